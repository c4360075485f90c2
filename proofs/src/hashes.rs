//! The protocol's hashes, and the checks of a share that use them.
//!
//! The hashes are of one share or of several in parallel ([`Word`]).

use ff::{Field, PrimeField};

use crate::errors::{Error, Result, Rule};
use crate::fields::{Base, Encoded, Point};
use crate::poseidon::{poseidon, Prefix, Word};

/// Shares that a vote is split into.
pub const SHARES: usize = 16;

/// Domain separator of vote commitments among the leaves of the tree.
const DOMAIN_VC: u64 = 1;
/// Domain separator of share nullifiers.
const SHARE_SPEND: &[u8] = b"share spend";

/// The commitment to one share: its blind and its ciphertext.
pub fn share_commitment<W: Word>(blind: W, c1: &Point<W>, c2: &Point<W>) -> W {
    poseidon(&[blind, c1.x, c2.x, c1.y, c2.y])
}

/// The hash of all share commitments of a vote.
pub fn shares_hash<W: Word>(share_comms: &[W; SHARES]) -> W {
    poseidon(share_comms)
}

/// The vote commitment: the leaf that a cast vote appends to the tree.
pub fn vote_commitment<W: Word>(
    round_id: W,
    shares_hash: W,
    proposal_id: W,
    vote_decision: W,
) -> W {
    poseidon(&[
        constant(Base::from(DOMAIN_VC)),
        round_id,
        shares_hash,
        proposal_id,
        vote_decision,
    ])
}

/// The nullifier of a share, which ensures that the share counts once.
pub fn share_nullifier(vote_commitment: Base, share_index: u64, blind: Base) -> Base {
    Vote::of(vote_commitment).nullifier(Base::from(share_index), blind)
}

/// Hash state that all shares of a vote have in common: half of the hashing of each.
#[derive(Clone, Copy)]
pub struct Vote<W = Base> {
    /// The vote commitment.
    pub commitment: W,
    /// Hash state of the common prefix of its shares' nullifiers.
    pub nullifiers: Prefix<W>,
}

impl<W: Word> Vote<W> {
    /// The vote of this commitment.
    pub fn of(commitment: W) -> Self {
        let nullifiers = Prefix::with_pair(4, [constant(share_spend_tag()), commitment]);
        Self {
            commitment,
            nullifiers,
        }
    }

    /// The nullifier of one of its shares.
    pub fn nullifier(&self, share_index: W, blind: W) -> W {
        self.nullifiers.finish(&[share_index, blind])
    }
}

fn constant<W: Word>(value: Base) -> W {
    W::repeat(&W::constant(value))
}

fn share_spend_tag() -> Base {
    let mut bytes = [0u8; 32];
    bytes[..SHARE_SPEND.len()].copy_from_slice(SHARE_SPEND);
    // 11 bytes of ASCII are far below the modulus.
    Option::from(Base::from_repr(bytes)).unwrap_or(Base::ZERO)
}

/// A share as a wallet sends it, decoded.
pub struct Share {
    /// The voting round.
    pub round_id: Base,
    /// Hash of the commitments as sent by the wallet, not checked.
    pub shares_hash: Base,
    /// The commitments of all shares of the vote.
    pub share_comms: [Base; SHARES],
    /// Index of this share.
    pub share_index: u64,
    /// The proposal voted on.
    pub proposal_id: u64,
    /// The option voted for.
    pub vote_decision: u64,
    /// Blind of this share's commitment.
    pub primary_blind: Base,
    /// First half of the ciphertext.
    pub c1: Point,
    /// Second half of the ciphertext.
    pub c2: Point,
}

/// The values derived from a valid share.
pub struct ShareIds {
    /// The expected leaf at the share's position in the tree.
    pub vote_commitment: Encoded,
    /// The share's nullifier.
    pub nullifier: Encoded,
}

impl Share {
    /// Whether `shares_hash` is the hash of `share_comms`: two thirds of the work, equal for all shares of a vote.
    pub fn has_valid_shares_hash(&self) -> bool {
        shares_hash(&self.share_comms) == self.shares_hash
    }

    /// Whether the share's commitment is the hash of its blind and ciphertext.
    pub fn has_valid_share_comm(&self) -> bool {
        check_share_comm(
            &self.share_comms,
            self.share_index,
            self.primary_blind,
            &self.c1,
            &self.c2,
        )
        .is_ok()
    }

    /// Returns its vote, without any check.
    pub fn vote(&self) -> Vote {
        Vote::of(vote_commitment(
            self.round_id,
            self.shares_hash,
            Base::from(self.proposal_id),
            Base::from(self.vote_decision),
        ))
    }

    /// Derives the ids from its vote, without any check.
    pub fn ids(&self, vote: &Vote) -> ShareIds {
        ShareIds {
            vote_commitment: vote.commitment.to_repr(),
            nullifier: vote
                .nullifier(Base::from(self.share_index), self.primary_blind)
                .to_repr(),
        }
    }
}

/// Checks that `share_comms[share_index]` commits to blind and ciphertext. The index must be in range.
pub fn check_share_comm(
    share_comms: &[Base; SHARES],
    share_index: u64,
    blind: Base,
    c1: &Point,
    c2: &Point,
) -> Result<()> {
    let expected = share_comms.get(share_index as usize);
    if expected == Some(&share_commitment(blind, c1, c2)) {
        Ok(())
    } else {
        Err(Error::ShareRule(Rule::ShareComm))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use circuits_k11::share_reveal::{domain_tag_share_spend, share_nullifier_hash};

    fn numbers<const N: usize>(from: u64) -> [Base; N] {
        std::array::from_fn(|i| Base::from(from + i as u64).square())
    }

    #[test]
    fn hashes_equal_the_circuits_own() {
        let [blind, x1, y1, x2, y2] = numbers(7);
        let (c1, c2) = (Point { x: x1, y: y1 }, Point { x: x2, y: y2 });
        assert_eq!(
            share_commitment(blind, &c1, &c2),
            circuits_k11::share_commitment(blind, x1, x2, y1, y2)
        );
        assert_eq!(
            shares_hash(&numbers(100)),
            circuits_k11::shares_hash_from_comms(numbers(100))
        );
        assert_eq!(share_spend_tag(), domain_tag_share_spend());
        assert_eq!(
            share_nullifier(x1, 5, blind),
            share_nullifier_hash(x1, Base::from(5), blind)
        );
    }
}
