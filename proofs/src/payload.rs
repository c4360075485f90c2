//! Fast path for valid shares: parses a posted JSON body and derives its ids.
//!
//! For an invalid or unusual body it returns `None`; the caller's own parser, which implements all rules and reports
//! the invalid field, then decides. Both parsers must agree on every body that is accepted here. Strings with escapes,
//! unknown names other than those that wallets are known to send, numbers other than plain integers, and repeated names
//! are therefore left to the caller.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use base64::{engine::general_purpose::STANDARD, Engine};
use ff::PrimeField;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::fields::{base, base_array, point, Encoded};
use crate::hashes::{Share, Vote, SHARES};

/// Limits of the fields; see `helper.ingest.payload`.
const MAX_PROPOSAL: u64 = 50;
const MAX_DECISION: u64 = 7;
const MAX_POSITION: u64 = (1 << 24) - 1;
const MAX_TIME: u64 = i64::MAX as u64;
/// Capacity of the cache of votes with checked commitments: votes whose shares arrive interleaved.
const REMEMBERED: usize = 1 << 14;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Ciphertext<'a> {
    c1: &'a str,
    c2: &'a str,
    share_index: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Body<'a> {
    #[serde(borrow)]
    enc_share: Ciphertext<'a>,
    vote_round_id: &'a str,
    proposal_id: u64,
    vote_decision: u64,
    tree_position: u64,
    submit_at: Option<u64>,
    shares_hash: &'a str,
    share_comms: [&'a str; SHARES],
    primary_blind: &'a str,
    /// Sent by some wallets, ignored.
    #[serde(rename = "all_enc_shares")]
    _all: Option<Vec<Ciphertext<'a>>>,
    /// Sent by other wallets, ignored.
    #[serde(rename = "share_index")]
    _index: Option<u64>,
}

/// A share with valid encodings and hashes, as bytes, and its derived values.
pub struct Payload {
    /// The voting round.
    pub round_id: Encoded,
    /// Its index among the vote's shares.
    pub share_index: u64,
    /// The proposal voted on.
    pub proposal_id: u64,
    /// The option voted for.
    pub vote_decision: u64,
    /// Position of the vote commitment in the tree.
    pub tree_position: u64,
    /// Time of its reveal in Unix seconds, 0 for immediately.
    pub submit_at: u64,
    /// Hash of the commitments.
    pub shares_hash: Encoded,
    /// The commitments, concatenated.
    pub share_comms: [u8; SHARES * 32],
    /// Blind of this share's commitment.
    pub primary_blind: Encoded,
    /// First half of the ciphertext.
    pub c1: Encoded,
    /// Second half of the ciphertext.
    pub c2: Encoded,
    /// The expected leaf at the position.
    pub vote_commitment: Encoded,
    /// The share's nullifier.
    pub nullifier: Encoded,
}

/// Parses and checks a body. `None` if it is invalid or unusual.
pub fn read(body: &[u8]) -> Option<Payload> {
    let lists = body.iter().filter(|&&byte| byte == b'[').count();
    if body.contains(&b'\\') {
        return None;
    }
    let body: Body = serde_json::from_slice(body).ok()?;
    // serde also accepts an array in place of an object
    if lists != 1 + usize::from(body._all.is_some()) {
        return None;
    }
    let sealed = &body.enc_share;
    let share_index = sealed.share_index.unwrap_or(0);
    let in_range = share_index < SHARES as u64
        && (1..=MAX_PROPOSAL).contains(&body.proposal_id)
        && body.vote_decision <= MAX_DECISION
        && body.tree_position <= MAX_POSITION
        && body.submit_at.unwrap_or(0) <= MAX_TIME;
    if !in_range {
        return None;
    }
    let mut round_id = [0; 32];
    hex::decode_to_slice(body.vote_round_id, &mut round_id).ok()?;
    let mut share_comms = [0; SHARES * 32];
    for (place, text) in share_comms.chunks_exact_mut(32).zip(body.share_comms) {
        place.copy_from_slice(&from_base64(text)?);
    }
    let mut payload = Payload {
        round_id,
        share_index,
        proposal_id: body.proposal_id,
        vote_decision: body.vote_decision,
        tree_position: body.tree_position,
        submit_at: body.submit_at.unwrap_or(0),
        shares_hash: from_base64(body.shares_hash)?,
        share_comms,
        primary_blind: from_base64(body.primary_blind)?,
        c1: from_base64(sealed.c1)?,
        c2: from_base64(sealed.c2)?,
        vote_commitment: [0; 32],
        nullifier: [0; 32],
    };
    fill_in_ids(&mut payload)?;
    Some(payload)
}

/// Checks encodings and hashes.
fn fill_in_ids(payload: &mut Payload) -> Option<()> {
    let share = Share {
        round_id: base("", &payload.round_id).ok()?,
        shares_hash: base("", &payload.shares_hash).ok()?,
        share_comms: base_array("", &payload.share_comms).ok()?,
        share_index: payload.share_index,
        proposal_id: payload.proposal_id,
        vote_decision: payload.vote_decision,
        primary_blind: base("", &payload.primary_blind).ok()?,
        c1: point("", &payload.c1).ok()?,
        c2: point("", &payload.c2).ok()?,
    };
    share.check_share_comm().ok()?;
    let known = digest(payload);
    let vote = match remembered(&known) {
        Some(vote) => vote,
        None => {
            share.check_shares_hash().ok()?;
            let vote = share.vote();
            remember(known, vote);
            vote
        }
    };
    let ids = share.ids(&vote);
    payload.vote_commitment = ids.vote_commitment.to_repr();
    payload.nullifier = ids.nullifier.to_repr();
    Some(())
}

/// Decodes 32 bytes from canonical standard base64 with padding.
fn from_base64(text: &str) -> Option<Encoded> {
    // the decoder requires space for complete groups of four characters
    let mut room = [0; 33];
    let length = STANDARD.decode_slice(text, &mut room).ok()?;
    let (bytes, _) = room.split_first_chunk()?;
    (length == 32).then_some(*bytes)
}

/// Reduces a JSON object to the members with these names, unparsed. If a name is repeated, the last member is used.
///
/// A document that is not an object becomes `null`. The error is the offset of the first invalid byte.
pub fn members(body: &[u8], names: &[&str]) -> Result<Vec<u8>, usize> {
    let text = std::str::from_utf8(body).map_err(|error| error.valid_up_to())?;
    let mut reader = serde_json::Deserializer::from_str(text);
    let found = Members { names }
        .deserialize(&mut reader)
        .and_then(|found| reader.end().map(|()| found));
    let found = match found {
        Ok(found) => found,
        Err(error) if error.is_data() => return Ok(b"null".to_vec()),
        Err(error) => return Err(offset(body, error.line(), error.column())),
    };
    let mut reduced = vec![b'{'];
    for (name, value) in names.iter().zip(found) {
        let Some(value) = value else { continue };
        if reduced.len() > 1 {
            reduced.push(b',');
        }
        reduced.extend(b"\"");
        reduced.extend(name.as_bytes());
        reduced.extend(b"\":");
        reduced.extend(value.get().as_bytes());
    }
    reduced.push(b'}');
    Ok(reduced)
}

/// Deserializes an object's members with these names, in the order of the names; skips all others.
struct Members<'n> {
    names: &'n [&'n str],
}

/// A name, copied only if it contains an escape.
#[derive(Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'de> DeserializeSeed<'de> for Members<'_> {
    type Value = Vec<Option<&'de RawValue>>;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<Self::Value, D::Error> {
        reader.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Members<'_> {
    type Value = Vec<Option<&'de RawValue>>;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Self::Value, A::Error> {
        let mut found = vec![None; self.names.len()];
        while let Some(Name(name)) = members.next_key()? {
            match self.names.iter().position(|known| *known == name) {
                Some(index) => found[index] = Some(members.next_value()?),
                None => {
                    members.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(found)
    }
}

/// Converts line and column (both from 1) to an offset.
fn offset(text: &[u8], line: usize, column: usize) -> usize {
    let before: usize = text
        .split_inclusive(|&byte| byte == b'\n')
        .take(line.saturating_sub(1))
        .map(<[u8]>::len)
        .sum();
    (before + column.saturating_sub(1)).min(text.len())
}

/// Cache of checked votes, by a digest of their commitments. All shares of a vote have the same commitments, whose hash
/// is two thirds of the work, and the same vote commitment and nullifier prefix, which are half of the rest.
static VOTES: Mutex<Option<Remembered>> = Mutex::new(None);

type Digest = [u8; 32];

/// Two generations: when the younger one is full, it replaces the older one.
#[derive(Default)]
struct Remembered {
    young: HashMap<Digest, Vote>,
    old: HashMap<Digest, Vote>,
}

/// Digest of all values that identify a vote.
fn digest(payload: &Payload) -> Digest {
    let hash = blake2b_simd::Params::new()
        .hash_length(32)
        .to_state()
        .update(&payload.round_id)
        .update(&payload.proposal_id.to_le_bytes())
        .update(&payload.vote_decision.to_le_bytes())
        .update(&payload.shares_hash)
        .update(&payload.share_comms)
        .finalize();
    let mut digest = [0; 32];
    digest.copy_from_slice(hash.as_bytes());
    digest
}

fn remembered(known: &Digest) -> Option<Vote> {
    let memory = VOTES.lock().unwrap_or_else(PoisonError::into_inner);
    let memory = memory.as_ref()?;
    memory
        .young
        .get(known)
        .or_else(|| memory.old.get(known))
        .copied()
}

fn remember(known: Digest, vote: Vote) {
    let mut memory = VOTES.lock().unwrap_or_else(PoisonError::into_inner);
    let memory = memory.get_or_insert_with(Remembered::default);
    if memory.young.len() >= REMEMBERED / 2 {
        memory.old = std::mem::take(&mut memory.young);
    }
    memory.young.insert(known, vote);
}
