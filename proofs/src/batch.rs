//! Checks of shares, eight in parallel.
//!
//! Only shares whose checks all succeed get a result. The caller checks the others one by one and finds their first
//! error.

use std::array::from_fn;
use std::collections::HashMap;

use ff::PrimeField;

use crate::fields::{Base, Encoded, ELEMENT};
use crate::hashes::{share_commitment, shares_hash, vote_commitment, ShareIds, Vote, SHARES};
use crate::lanes::{Lanes, LANES};
use crate::payload::{cache_vote, cached_vote, digest, Digest, Payload};
use crate::poseidon::Prefix;

/// The ids of the valid shares.
pub fn ids_of(shares: &[&Payload]) -> Vec<Option<ShareIds>> {
    let digests: Vec<_> = shares.iter().map(|share| digest(share)).collect();
    let new: HashMap<Digest, &Payload> = digests
        .iter()
        .zip(shares)
        .filter(|(digest, _)| cached_vote(digest).is_none())
        .map(|(digest, share)| (*digest, *share))
        .collect();
    let new: Vec<_> = new.into_iter().collect();
    new.chunks(LANES).for_each(cache_votes);
    let ready: Vec<_> = shares
        .iter()
        .zip(&digests)
        .enumerate()
        .filter_map(|(index, (share, digest))| Some((index, *share, cached_vote(digest)?)))
        .collect();
    let mut ids: Vec<_> = shares.iter().map(|_| None).collect();
    for chunk in ready.chunks(LANES) {
        for ((index, ..), found) in chunk.iter().zip(ids_of_lanes(chunk)) {
            ids[*index] = found;
        }
    }
    ids
}

/// An entry for each lane; the last one is repeated in lanes without an entry.
fn lanes<T, U>(entries: &[T], value: impl Fn(&T) -> U) -> [U; LANES] {
    from_fn(|lane| value(&entries[lane.min(entries.len() - 1)]))
}

fn is_canonical(bytes: &Encoded) -> bool {
    Base::from_repr(*bytes).is_some().into()
}

fn integer(value: u64) -> Encoded {
    Base::from(value).to_repr()
}

fn share_comm(share: &Payload, index: usize) -> Encoded {
    let mut bytes = [0; ELEMENT];
    bytes.copy_from_slice(&share.share_comms[index * ELEMENT..][..ELEMENT]);
    bytes
}

/// Caches the votes of these shares whose commitments are valid.
fn cache_votes(shares: &[(Digest, &Payload)]) {
    let read = |field: &dyn Fn(&Payload) -> Encoded| {
        Lanes::from_integers(lanes(shares, |(_, share)| field(share)))
    };
    let share_comms = from_fn(|index| read(&|share| share_comm(share, index)));
    let hashes = shares_hash(&share_comms).to_encodings();
    let votes = Vote::of(vote_commitment(
        read(&|share| share.round_id),
        read(&|share| share.shares_hash),
        read(&|share| integer(share.proposal_id)),
        read(&|share| integer(share.vote_decision)),
    ));
    let commitments = votes.commitment.to_elements();
    let states = votes.nullifiers.state.map(Lanes::to_elements);
    for (lane, (digest, share)) in shares.iter().enumerate() {
        let is_valid = hashes[lane] == share.shares_hash
            && is_canonical(&share.round_id)
            && (0..SHARES).all(|index| is_canonical(&share_comm(share, index)));
        if is_valid {
            let state = from_fn(|word| states[word][lane]);
            let vote = Vote {
                commitment: commitments[lane],
                nullifiers: Prefix { state },
            };
            cache_vote(*digest, vote);
        }
    }
}

/// The ids of valid shares of these valid votes.
fn ids_of_lanes(shares: &[(usize, &Payload, Vote)]) -> [Option<ShareIds>; LANES] {
    let read = |field: &dyn Fn(&Payload) -> Encoded| {
        Lanes::from_integers(lanes(shares, |(_, share, _)| field(share)))
    };
    let vote_words =
        |word: &dyn Fn(&Vote) -> Base| Lanes::from_elements(lanes(shares, |(.., vote)| word(vote)));
    let blind = read(&|share| share.primary_blind);
    let (c1, c1_valid) = Lanes::points(lanes(shares, |(_, share, _)| share.c1));
    let (c2, c2_valid) = Lanes::points(lanes(shares, |(_, share, _)| share.c2));
    let share_comms = share_commitment(blind, &c1, &c2).to_encodings();
    let votes = Vote {
        commitment: vote_words(&|vote| vote.commitment),
        nullifiers: Prefix {
            state: from_fn(|word| vote_words(&|vote| vote.nullifiers.state[word])),
        },
    };
    let indexes = read(&|share| integer(share.share_index));
    let nullifiers = votes.nullifier(indexes, blind).to_encodings();
    from_fn(|lane| {
        let (_, share, vote) = shares.get(lane)?;
        let is_valid = is_canonical(&share.primary_blind)
            && c1_valid[lane]
            && c2_valid[lane]
            && share_comms[lane] == share_comm(share, share.share_index as usize);
        is_valid.then(|| ShareIds {
            vote_commitment: vote.commitment.to_repr(),
            nullifier: nullifiers[lane],
        })
    })
}
