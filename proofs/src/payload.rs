//! Validation of posted shares: parses a JSON body, checks encodings and hashes, and derives the share's ids.
//!
//! The result is a valid share, or the first invalid field and the reason. `helper.core.share` describes the fields,
//! `helper.core.share_fields` has the texts of the reasons.
//!
//! JSON and base64 leave some choices open; these are made here:
//!
//! - base64 is the standard alphabet with padding and nothing else, not even line breaks. Only the canonical encoding is
//!   valid (the unused bits of the last character are zero). Real wallets write exactly this.
//! - Integers are JSON integers: no `1.0`, no `1e3`, no strings, no booleans.
//! - `null` means that a field is absent; only an integer with a default may be absent.
//! - Names are case-sensitive; the last of repeated names counts; unknown names are ignored.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::{Mutex, PoisonError};

use base64::{engine::general_purpose::STANDARD, Engine};
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::errors::{self, Error, Rule};
use crate::fields::{base, base_array, point, Encoded};
use crate::hashes::{Share, ShareIds, Vote, SHARES};
use crate::json::{self, Json};
use crate::steps::count_steps;

/// Limits of the fields, as in `helper.core.share`.
const PROPOSALS: RangeInclusive<i128> = 1..=50;
const DECISIONS: RangeInclusive<i128> = 0..=7;
const POSITIONS: RangeInclusive<i128> = 0..=(1 << 24) - 1;
const TIMES: RangeInclusive<i128> = 0..=i64::MAX as i128;
const INDEXES: RangeInclusive<i128> = 0..=SHARES as i128 - 1;
/// Maximum bytes of a share's fields. A larger body is first reduced to them.
const SMALL_BODY: usize = 16 << 10;
/// Capacity of the cache of votes with checked commitments: enough for votes whose shares arrive interleaved.
const CACHED_VOTES: usize = 1 << 14;

/// Field name in errors of the body as a whole.
const BODY: &str = "body";
/// Fields of a share.
const FIELDS: [&str; 9] = [
    "enc_share",
    "vote_round_id",
    "proposal_id",
    "vote_decision",
    "tree_position",
    "submit_at",
    "shares_hash",
    "share_comms",
    "primary_blind",
];
/// Fields of `enc_share`.
const INNER_FIELDS: [&str; 3] = ["share_index", "c1", "c2"];
/// Sent by some wallets and ignored, except that errors of the JSON syntax can refer to it.
const ALL_ENC_SHARES: &str = "all_enc_shares";

/// Why a body is not a valid share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invalid {
    /// The field's name on the wire, or `body`.
    pub field: String,
    /// Why it is invalid.
    pub reason: Reason,
}

/// Why a field is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The body is not UTF-8 from this field on.
    NotUtf8,
    /// The body is not JSON from this field on.
    NotJson,
    /// All fields together are larger than [`SMALL_BODY`].
    TooLarge,
    /// The field is absent.
    Missing,
    /// The JSON type is wrong.
    Type,
    /// The array has this number of entries.
    Count(usize),
    /// Not 64 hex characters.
    NotHex,
    /// Not canonical base64.
    NotBase64,
    /// The base64 encodes this number of bytes.
    Length(usize),
    /// A value whose encoding is invalid or that is out of range.
    Encoding(errors::Reason),
    /// A hash of the share does not match.
    Rule(Rule),
}

impl Reason {
    /// Identifier of the reason in Python.
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::NotUtf8 => "not-utf8",
            Reason::NotJson => "not-json",
            Reason::TooLarge => "too-large",
            Reason::Missing => "missing",
            Reason::Type => "type",
            Reason::Count(_) => "count",
            Reason::NotHex => "not-hex",
            Reason::NotBase64 => "not-base64",
            Reason::Length(_) => "length",
            Reason::Encoding(reason) => reason.as_str(),
            Reason::Rule(rule) => rule.as_str(),
        }
    }

    /// The actual number of bytes or entries.
    pub fn actual(self) -> Option<usize> {
        match self {
            Reason::Count(actual) | Reason::Length(actual) => Some(actual),
            _ => None,
        }
    }
}

type Result<T> = std::result::Result<T, Invalid>;

impl Invalid {
    fn new(field: impl fmt::Display, reason: Reason) -> Self {
        let field = field.to_string();
        Invalid { field, reason }
    }
}

impl From<Error> for Invalid {
    fn from(error: Error) -> Self {
        match error {
            Error::Encoding { field, reason } => Invalid::new(field, Reason::Encoding(reason)),
            _ => unreachable!("decoding has no other errors"),
        }
    }
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

/// A field of a share.
pub enum Value<'a> {
    /// An integer.
    Integer(u64),
    /// Bytes.
    Bytes(&'a [u8]),
}

impl Payload {
    /// The fields as posted, in the order of `helper.core.share.Share`.
    pub fn posted(&self) -> [Value<'_>; 11] {
        use Value::{Bytes, Integer};
        [
            Integer(self.share_index),
            Bytes(&self.c1),
            Bytes(&self.c2),
            Bytes(&self.round_id),
            Integer(self.proposal_id),
            Integer(self.vote_decision),
            Integer(self.tree_position),
            Integer(self.submit_at),
            Bytes(&self.shares_hash),
            Bytes(&self.share_comms),
            Bytes(&self.primary_blind),
        ]
    }
}

/// Validates bodies. The error of each is the first one in the order: JSON, fields, encodings, hashes.
pub fn read_all(bodies: &[&[u8]]) -> Vec<Result<Payload>> {
    let parsed: Vec<_> = bodies.iter().map(|body| parse(body)).collect();
    let shares: Vec<&Payload> = parsed.iter().flatten().collect();
    let mut ids = ids_in_parallel(&shares).into_iter();
    let fill_in_ids = |parsed: Result<Payload>| {
        let mut payload = parsed?;
        let ids = match ids.next().flatten() {
            Some(ids) => ids,
            None => ids_of(&payload)?,
        };
        payload.vote_commitment = ids.vote_commitment;
        payload.nullifier = ids.nullifier;
        Ok(payload)
    };
    parsed.into_iter().map(fill_in_ids).collect()
}

/// The ids of shares whose encodings and hashes were found to be valid in parallel, if the processor can do that. A
/// single share is faster without.
fn ids_in_parallel(shares: &[&Payload]) -> Vec<Option<ShareIds>> {
    #[cfg(target_arch = "x86_64")]
    if shares.len() > 1 && crate::lanes::available() {
        return crate::batch::ids_of(shares);
    }
    shares.iter().map(|_| None).collect()
}

/// Reads the fields of a body.
fn parse(body: &[u8]) -> Result<Payload> {
    let text = std::str::from_utf8(body)
        .map_err(|error| Invalid::new(field_at(&body[..error.valid_up_to()]), Reason::NotUtf8))?;
    if body.len() <= SMALL_BODY {
        return parse_small(text);
    }
    let reduced = members(text, &FIELDS).map_err(|offset| not_json(text, offset))?;
    if reduced.len() > SMALL_BODY {
        return Err(Invalid::new(BODY, Reason::TooLarge));
    }
    parse_small(&reduced)
}

fn parse_small(text: &str) -> Result<Payload> {
    let document = json::parse(text).map_err(|offset| not_json(text, offset))?;
    read_fields(&Object::read(BODY, &document)?)
}

fn not_json(text: &str, offset: usize) -> Invalid {
    Invalid::new(field_at(&text.as_bytes()[..offset]), Reason::NotJson)
}

/// Reads the fields in the order in which their errors are reported.
fn read_fields(body: &Object) -> Result<Payload> {
    let enc_share = Object::read("enc_share", body.required("enc_share")?)?;
    Ok(Payload {
        share_index: enc_share.integer_or_zero("enc_share.share_index", INDEXES)?,
        c1: enc_share.bytes("enc_share.c1")?,
        c2: enc_share.bytes("enc_share.c2")?,
        round_id: body.hex("vote_round_id")?,
        proposal_id: body.integer("proposal_id", PROPOSALS)?,
        vote_decision: body.integer("vote_decision", DECISIONS)?,
        tree_position: body.integer("tree_position", POSITIONS)?,
        submit_at: body.integer_or_zero("submit_at", TIMES)?,
        shares_hash: body.bytes("shares_hash")?,
        share_comms: body.byte_strings("share_comms")?,
        primary_blind: body.bytes("primary_blind")?,
        vote_commitment: [0; 32],
        nullifier: [0; 32],
    })
}

/// Checks encodings and hashes, and derives the ids.
fn ids_of(payload: &Payload) -> Result<ShareIds> {
    let share = decode(payload)?;
    let digest = digest(payload);
    let cached = cached_vote(&digest);
    if cached.is_none() && !share.has_valid_shares_hash() {
        let reason = Reason::Rule(Rule::SharesHash);
        return Err(Invalid::new("shares_hash", reason));
    }
    if !share.has_valid_share_comm() {
        let field = format_args!("share_comms[{}]", share.share_index);
        return Err(Invalid::new(field, Reason::Rule(Rule::ShareComm)));
    }
    let vote = cached.unwrap_or_else(|| {
        let vote = share.vote();
        cache_vote(digest, vote);
        vote
    });
    Ok(share.ids(&vote))
}

fn decode(payload: &Payload) -> Result<Share> {
    Ok(Share {
        round_id: base("vote_round_id", &payload.round_id)?,
        shares_hash: base("shares_hash", &payload.shares_hash)?,
        share_comms: base_array("share_comms", &payload.share_comms)?,
        share_index: payload.share_index,
        proposal_id: payload.proposal_id,
        vote_decision: payload.vote_decision,
        primary_blind: base("primary_blind", &payload.primary_blind)?,
        c1: point("enc_share.c1", &payload.c1)?,
        c2: point("enc_share.c2", &payload.c2)?,
    })
}

/// A JSON object whose fields are read by their name on the wire.
struct Object<'j, 'a> {
    members: &'j [(Cow<'a, str>, Json<'a>)],
}

impl<'j, 'a> Object<'j, 'a> {
    fn read(field: &str, value: &'j Json<'a>) -> Result<Self> {
        match value {
            Json::Object(members) => Ok(Object { members }),
            _ => Err(Invalid::new(field, Reason::Type)),
        }
    }

    fn optional(&self, field: &str) -> Option<&'j Json<'a>> {
        let key = field.rsplit_once('.').map_or(field, |(_, key)| key);
        count_steps(self.members.len());
        let last = self.members.iter().rev().find(|(name, _)| name == key);
        last.map(|(_, value)| value)
            .filter(|value| !matches!(value, Json::Null))
    }

    fn required(&self, field: &str) -> Result<&'j Json<'a>> {
        self.optional(field)
            .ok_or_else(|| Invalid::new(field, Reason::Missing))
    }

    fn integer(&self, field: &str, range: RangeInclusive<i128>) -> Result<u64> {
        read_integer(field, self.required(field)?, range)
    }

    fn integer_or_zero(&self, field: &str, range: RangeInclusive<i128>) -> Result<u64> {
        match self.optional(field) {
            Some(value) => read_integer(field, value, range),
            None => Ok(0),
        }
    }

    /// 32 bytes in hex.
    fn hex(&self, field: &str) -> Result<Encoded> {
        let not_hex = || Invalid::new(field, Reason::NotHex);
        let Json::Text(text) = self.required(field)? else {
            return Err(not_hex());
        };
        count_steps(text.len());
        let mut bytes = [0; 32];
        hex::decode_to_slice(text.as_bytes(), &mut bytes).map_err(|_| not_hex())?;
        Ok(bytes)
    }

    /// 32 bytes in base64.
    fn bytes(&self, field: &str) -> Result<Encoded> {
        read_bytes(field, self.required(field)?)
    }

    /// An array of 32 bytes each in base64, concatenated.
    fn byte_strings(&self, field: &str) -> Result<[u8; SHARES * 32]> {
        let Json::Array(entries) = self.required(field)? else {
            return Err(Invalid::new(field, Reason::Type));
        };
        if entries.len() != SHARES {
            return Err(Invalid::new(field, Reason::Count(entries.len())));
        }
        let mut joined = [0; SHARES * 32];
        for (index, (slot, entry)) in joined.chunks_exact_mut(32).zip(entries).enumerate() {
            slot.copy_from_slice(&read_bytes(format_args!("{field}[{index}]"), entry)?);
        }
        Ok(joined)
    }
}

fn read_integer(field: &str, value: &Json, range: RangeInclusive<i128>) -> Result<u64> {
    let Json::Integer(value) = value else {
        return Err(Invalid::new(field, Reason::Type));
    };
    if !range.contains(value) {
        return Err(Invalid::new(field, Reason::Encoding(errors::Reason::Range)));
    }
    Ok(*value as u64)
}

fn read_bytes(field: impl fmt::Display, value: &Json) -> Result<Encoded> {
    let Json::Text(text) = value else {
        return Err(Invalid::new(field, Reason::Type));
    };
    from_base64(text).ok_or_else(|| {
        let reason = match decoded_length(text) {
            Some(length) if length != 32 => Reason::Length(length),
            _ => Reason::NotBase64,
        };
        Invalid::new(field, reason)
    })
}

/// Decodes 32 bytes from canonical standard base64 with padding.
fn from_base64(text: &str) -> Option<Encoded> {
    count_steps(text.len());
    // the decoder requires space for complete groups of four characters
    let mut buffer = [0; 33];
    let length = STANDARD.decode_slice(text, &mut buffer).ok()?;
    let (bytes, _) = buffer.split_first_chunk()?;
    (length == 32).then_some(*bytes)
}

/// Number of bytes of a base64 text, for the error message: unused bits and padding after complete groups are ignored.
fn decoded_length(text: &str) -> Option<usize> {
    count_steps(text.len());
    let data = text.trim_end_matches('=');
    let in_alphabet = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'+' || byte == b'/';
    if !data.bytes().all(in_alphabet) {
        return None;
    }
    let is_padded = match (data.len() % 4, text.len() - data.len()) {
        (0, padding) => padding == 0 || !data.is_empty(),
        (remainder, padding) => remainder > 1 && remainder + padding == 4,
    };
    is_padded.then_some(data.len() * 3 / 4)
}

/// The field in which the beginning of a body ends. Contains only known names, never input.
fn field_at(beginning: &[u8]) -> String {
    count_steps(beginning.len());
    let is_start = |byte: &&u8| **byte & 0xc0 != 0x80; // of a character
    if beginning.iter().filter(is_start).count() > SMALL_BODY {
        return BODY.to_owned();
    }
    let levels = open_levels(beginning);
    let Some(Level::Object(name)) = levels.first() else {
        return BODY.to_owned();
    };
    let is_named = |known: &&str| known.as_bytes() == *name;
    let Some(field) = FIELDS
        .iter()
        .chain(&[ALL_ENC_SHARES])
        .copied()
        .find(is_named)
    else {
        return BODY.to_owned();
    };
    match (field, levels.get(1)) {
        ("share_comms", Some(Level::Array(index))) if *index < SHARES => {
            format!("{field}[{index}]")
        }
        ("enc_share", Some(Level::Object(inner))) => INNER_FIELDS
            .iter()
            .find(|known| known.as_bytes() == *inner)
            .map_or(field.to_owned(), |known| format!("{field}.{known}")),
        _ => field.to_owned(),
    }
}

/// An array or object that is open at the end of a text.
#[derive(Debug, PartialEq)]
enum Level<'a> {
    /// Index of the current entry.
    Array(usize),
    /// Name of the current member as written; empty before its colon.
    Object(&'a [u8]),
}

/// The open arrays and objects, outermost first. The text need not be valid.
fn open_levels(text: &[u8]) -> Vec<Level<'_>> {
    let mut levels = Vec::new();
    let mut last: &[u8] = b"";
    let mut at = 0;
    // Every quote before this offset is an escaped one of an incomplete string. A string that begins at one of them
    // has the same escapes, so it is incomplete too: it is not scanned, which keeps the time linear.
    let mut incomplete_to = 0;
    while let Some(&byte) = text.get(at) {
        count_steps(1);
        at += 1;
        if byte == b'"' {
            // the quote of an incomplete string is skipped
            if at > incomplete_to {
                match string_end(text, at) {
                    Ok(end) => {
                        last = &text[at..end];
                        at = end + 1;
                    }
                    Err(end) => incomplete_to = end,
                }
            }
            continue;
        }
        match (byte, levels.last_mut()) {
            (b'{', _) => levels.push(Level::Object(b"")),
            (b'[', _) => levels.push(Level::Array(0)),
            (b'}' | b']', _) => drop(levels.pop()),
            (b',', Some(Level::Array(index))) => *index += 1,
            (b',', Some(Level::Object(name))) => *name = b"",
            (b':', Some(Level::Object(name))) => *name = last,
            (b',' | b':', _) => {}
            _ => continue,
        }
        last = b"";
    }
    levels
}

/// Offset of the closing quote of a string whose characters begin at `at`; the error is where the scan stopped.
fn string_end(text: &[u8], mut at: usize) -> std::result::Result<usize, usize> {
    loop {
        count_steps(1);
        match text.get(at) {
            Some(b'"') => return Ok(at),
            Some(b'\\') if !matches!(text.get(at + 1), None | Some(b'\n')) => at += 2,
            None | Some(b'\\') => return Err(at),
            Some(_) => at += 1,
        }
    }
}

/// Reduces a JSON object to the members with these names, unparsed. If a name is repeated, the last member is used.
///
/// A document that is not an object becomes `null`. The error is the offset of the first invalid byte.
fn members(text: &str, names: &[&str]) -> std::result::Result<String, usize> {
    let mut reader = serde_json::Deserializer::from_str(text);
    let parsed = Members { names }
        .deserialize(&mut reader)
        .and_then(|values| reader.end().map(|()| values));
    let values = match parsed {
        Ok(values) => values,
        Err(error) if error.is_data() => return Ok("null".to_owned()),
        Err(error) => return Err(offset(text.as_bytes(), error.line(), error.column())),
    };
    let mut reduced = String::from("{");
    for (name, value) in names.iter().zip(values) {
        let Some(value) = value else { continue };
        if reduced.len() > 1 {
            reduced.push(',');
        }
        reduced.push('"');
        reduced.push_str(name);
        reduced.push_str("\":");
        reduced.push_str(value.get());
    }
    reduced.push('}');
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

    fn deserialize<D: Deserializer<'de>>(
        self,
        reader: D,
    ) -> std::result::Result<Self::Value, D::Error> {
        reader.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Members<'_> {
    type Value = Vec<Option<&'de RawValue>>;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(
        self,
        mut members: A,
    ) -> std::result::Result<Self::Value, A::Error> {
        let mut values = vec![None; self.names.len()];
        while let Some(Name(name)) = members.next_key()? {
            match self.names.iter().position(|known| *known == name) {
                Some(index) => values[index] = Some(members.next_value()?),
                None => {
                    members.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(values)
    }
}

/// Converts line and column (both from 1) to an offset.
fn offset(text: &[u8], line: usize, column: usize) -> usize {
    count_steps(text.len());
    let before: usize = text
        .split_inclusive(|&byte| byte == b'\n')
        .take(line.saturating_sub(1))
        .map(<[u8]>::len)
        .sum();
    (before + column.saturating_sub(1)).min(text.len())
}

/// Cache of checked votes, by a digest of their commitments. All shares of a vote have the same commitments, whose hash
/// is two thirds of the work, and the same vote commitment and nullifier prefix, which are half of the rest.
static VOTES: Mutex<Option<VoteCache>> = Mutex::new(None);

/// A digest of all values that identify a vote.
pub type Digest = [u8; 32];

/// Two generations: when the younger one is full, it replaces the older one.
#[derive(Default)]
struct VoteCache {
    young: HashMap<Digest, Vote>,
    old: HashMap<Digest, Vote>,
}

/// The digest of a share's vote.
pub fn digest(payload: &Payload) -> Digest {
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

/// The vote of this digest, if it was checked.
pub fn cached_vote(digest: &Digest) -> Option<Vote> {
    let cache = VOTES.lock().unwrap_or_else(PoisonError::into_inner);
    let cache = cache.as_ref()?;
    cache
        .young
        .get(digest)
        .or_else(|| cache.old.get(digest))
        .copied()
}

/// Remembers a vote whose commitments are valid.
pub fn cache_vote(digest: Digest, vote: Vote) {
    let mut cache = VOTES.lock().unwrap_or_else(PoisonError::into_inner);
    let cache = cache.get_or_insert_with(VoteCache::default);
    if cache.young.len() >= CACHED_VOTES / 2 {
        cache.old = std::mem::take(&mut cache.young);
    }
    cache.young.insert(digest, vote);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fields::{Base, ELEMENT};
    use crate::hashes::{share_commitment, shares_hash};
    use crate::steps::require_linear;
    use ff::{Field, PrimeField};
    use group::{prime::PrimeCurveAffine, Curve, GroupEncoding};
    use pasta_curves::pallas;
    use rand::{rngs::StdRng, Rng, SeedableRng};
    use std::array::from_fn;

    const TWO_VOTES: usize = 2 * SHARES;

    fn read(body: &[u8]) -> Result<Payload> {
        read_all(&[body]).remove(0)
    }

    fn field_of(beginning: &str) -> String {
        field_at(beginning.as_bytes())
    }

    #[test]
    fn json_errors_name_the_field() {
        let cases = [
            ("", "body"),
            ("[{\"c1\":", "body"),
            ("{\"secret\": ", "body"),
            ("{\"proposal_id\"", "body"),
            ("{\"proposal_id\": 1", "proposal_id"),
            ("{\"proposal_id\": 1, ", "body"),
            ("{\"all_enc_shares\": [{\"c1\":", "all_enc_shares"),
            ("{\"enc_share\": {\"c1\": \"ab", "enc_share.c1"),
            ("{\"enc_share\": {\"c1\": 1, ", "enc_share"),
            ("{\"enc_share\": [\"c1\", ", "enc_share"),
            ("{\"share_comms\": [[1], {\"a\": 2}, 3", "share_comms[2]"),
            ("{\"share_comms\": [\"[,\\\",\", ", "share_comms[1]"),
            ("{\"share_comms\": {\"a\": ", "share_comms"),
        ];
        for (beginning, field) in cases {
            assert_eq!(field_of(beginning), field, "{beginning}");
        }
        let entries = "{\"share_comms\": [".to_owned() + &"0,".repeat(SHARES);
        assert_eq!(field_of(&entries), "share_comms");
        let long = "{\"proposal_id\": ".to_owned() + &" ".repeat(SMALL_BODY);
        assert_eq!(field_of(&long), "body");
    }

    /// The open arrays and objects by definition: each quote begins a string if the string is complete.
    fn open_levels_by_definition(text: &[u8]) -> Vec<Level<'_>> {
        let mut levels = Vec::new();
        let (mut last, mut at): (&[u8], usize) = (b"", 0);
        while at < text.len() {
            let byte = text[at];
            at += 1;
            match (byte, levels.last_mut()) {
                (b'"', _) => {
                    if let Ok(end) = string_end(text, at) {
                        (last, at) = (&text[at..end], end + 1);
                    }
                    continue;
                }
                (b'{', _) => levels.push(Level::Object(b"")),
                (b'[', _) => levels.push(Level::Array(0)),
                (b'}' | b']', _) => drop(levels.pop()),
                (b',', Some(Level::Array(index))) => *index += 1,
                (b',', Some(Level::Object(name))) => *name = b"",
                (b':', Some(Level::Object(name))) => *name = last,
                (b',' | b':', _) => {}
                _ => continue,
            }
            last = b"";
        }
        levels
    }

    /// Random texts in which strings are often incomplete. `RANDOM_TEXTS` sets their number.
    #[test]
    fn open_levels_are_those_by_definition() {
        let count = std::env::var("RANDOM_TEXTS").map_or(200_000, |text| text.parse().unwrap());
        let mut rng = StdRng::seed_from_u64(7);
        let alphabet = *b"\"\"\"\\\\\\\n{{}[[],:a";
        for _ in 0..count {
            let length = rng.gen_range(0..48);
            let text: Vec<u8> = (0..length)
                .map(|_| alphabet[rng.gen_range(0..alphabet.len())])
                .collect();
            let text = text.as_slice();
            assert_eq!(
                open_levels(text),
                open_levels_by_definition(text),
                "{text:?}"
            );
        }
    }

    #[test]
    fn twice_the_input_takes_twice_the_steps() {
        let cases = [
            (
                "open string of escaped quotes",
                "{\"proposal_id\":\"",
                "\\\"",
                "",
            ),
            ("open strings before line ends", "{", "\"\\\n", ""),
            ("open strings of escapes", "{", "\"\\\"\\\n", "\""),
            ("quotes", "", "\"", ""),
            ("nesting", "", "{[", ""),
            ("closing", "", "]", ""),
            ("members", "{", "\"a\":0,", "\"enc_share\":{}}"),
            ("inner members", "{\"enc_share\":{", "\"a\":0,", "\"a\":0}}"),
            ("base64", "{\"enc_share\":{\"c1\":\"", "A", "\"}}"),
            ("invalid UTF-8", "{\"", "é", "\u{fffd}"),
        ];
        for (name, start, repeated, end) in cases {
            require_linear(name, 800, |count| {
                let body = format!("{start}{}{end}", repeated.repeat(count));
                assert!(read(body.as_bytes()).is_err(), "{name}");
                field_at(body.as_bytes());
            });
        }
        let large = |count: usize| format!("{{\"a\":[{}1}}", "1,\n".repeat(count));
        require_linear("large body", 2 * SMALL_BODY, |count| {
            assert!(members(&large(count), &FIELDS).is_err());
        });
        require_linear("entries", 800, |count| {
            let entries = (0..SHARES)
                .map(|_| Json::Text("A".repeat(count).into()))
                .collect();
            let members = [("share_comms".into(), Json::Array(entries))];
            assert!(Object { members: &members }
                .byte_strings("share_comms")
                .is_err());
        });
        require_linear("hex", 800, |count| {
            let members = [("a".into(), Json::Text("0".repeat(count).into()))];
            assert!(Object { members: &members }.hex("a").is_err());
        });
    }

    #[test]
    fn base64_lengths_ignore_unused_bits() {
        let cases = [
            ("", Some(0)),
            ("AAAA", Some(3)),
            ("AAAA=", Some(3)),
            ("AB==", Some(1)),
            ("AAB=", Some(2)),
            ("=", None),
            ("A===", None),
            ("AA=", None),
            ("AAA", None),
            ("AAA==", None),
            ("AA==AA==", None),
            ("AAA_", None),
            ("AAA\n", None),
        ];
        for (text, length) in cases {
            assert_eq!(decoded_length(text), length, "{text}");
        }
    }

    #[test]
    fn large_bodies_are_reduced_to_their_fields() {
        let body =
            "{\"x\": [1, {}], \"proposal_id\": \"a\", \"proposal_id\" : 2,\"enc_share\":{} }";
        assert_eq!(
            members(body, &FIELDS).as_deref(),
            Ok("{\"enc_share\":{},\"proposal_id\":2}")
        );
        assert_eq!(members("[1]", &FIELDS).as_deref(), Ok("null"));
        assert_eq!(members("{\"a\":,", &FIELDS), Err(5));
    }

    /// The body of a share's POST.
    fn body(share: &Payload) -> String {
        let text = |bytes: &[u8]| STANDARD.encode(bytes);
        let share_comms: Vec<_> = share.share_comms.chunks(ELEMENT).map(text).collect();
        let round_id = hex::encode(share.round_id);
        format!(
            r#"{{"enc_share": {{"share_index": {}, "c1": "{}", "c2": "{}"}}, "vote_round_id": "{round_id}",
            "proposal_id": {}, "vote_decision": {}, "tree_position": {}, "submit_at": {}, "shares_hash": "{}",
            "share_comms": {share_comms:?}, "primary_blind": "{}"}}"#,
            share.share_index,
            text(&share.c1),
            text(&share.c2),
            share.proposal_id,
            share.vote_decision,
            share.tree_position,
            share.submit_at,
            text(&share.shares_hash),
            text(&share.primary_blind),
        )
    }

    /// The ids of a share, from the checks of a single share without the cache.
    fn reference(payload: &Payload) -> Result<(Encoded, Encoded)> {
        let share = decode(payload)?;
        if !share.has_valid_shares_hash() {
            let reason = Reason::Rule(Rule::SharesHash);
            return Err(Invalid::new("shares_hash", reason));
        }
        if !share.has_valid_share_comm() {
            let field = format_args!("share_comms[{}]", share.share_index);
            return Err(Invalid::new(field, Reason::Rule(Rule::ShareComm)));
        }
        let ids = share.ids(&share.vote());
        Ok((ids.vote_commitment, ids.nullifier))
    }

    /// The shares of a random vote, without ids.
    fn vote(rng: &mut StdRng) -> Vec<Payload> {
        let mut element = || Base::random(&mut *rng);
        let round_id = element();
        let blinds: [Base; SHARES] = from_fn(|_| element());
        let points: [[Encoded; 2]; SHARES] = from_fn(|_| {
            from_fn(|_| {
                let scalar = pallas::Scalar::random(&mut *rng);
                (pallas::Affine::generator() * scalar)
                    .to_affine()
                    .to_bytes()
            })
        });
        let comms: [Base; SHARES] = from_fn(|i| {
            let [c1, c2] = points[i].map(|bytes| point("point", &bytes).unwrap());
            share_commitment(blinds[i], &c1, &c2)
        });
        let mut share_comms = [0; SHARES * ELEMENT];
        for (slot, comm) in share_comms.chunks_exact_mut(ELEMENT).zip(&comms) {
            slot.copy_from_slice(&comm.to_repr());
        }
        (0..SHARES)
            .map(|index| Payload {
                round_id: round_id.to_repr(),
                share_index: index as u64,
                proposal_id: 1 + index as u64 % 2,
                vote_decision: 2,
                tree_position: 3,
                submit_at: 4,
                shares_hash: shares_hash(&comms).to_repr(),
                share_comms,
                primary_blind: blinds[index].to_repr(),
                c1: points[index][0],
                c2: points[index][1],
                vote_commitment: [0; 32],
                nullifier: [0; 32],
            })
            .collect()
    }

    /// Replaces a value by one that is often invalid.
    fn damage(share: &mut Payload, rng: &mut StdRng) {
        let (_, other) = share
            .share_comms
            .split_at(rng.gen_range(0..SHARES) * ELEMENT);
        let other: Encoded = other[..ELEMENT].try_into().unwrap();
        let mut modulus = (-Base::ONE).to_repr();
        modulus[0] += 1;
        let field = match rng.gen_range(0..7) {
            0 => &mut share.round_id,
            1 => &mut share.shares_hash,
            2 => &mut share.primary_blind,
            3 => &mut share.c1,
            4 => &mut share.c2,
            5 => {
                share.share_index = rng.gen_range(0..SHARES as u64);
                return;
            }
            _ => {
                let at = rng.gen_range(0..SHARES) * ELEMENT;
                (&mut share.share_comms[at..at + ELEMENT])
                    .try_into()
                    .unwrap()
            }
        };
        match rng.gen_range(0..8) {
            0 => *field = [0; 32],
            1 => *field = [0xff; 32],
            2 => *field = modulus,
            3 => *field = (-Base::ONE).to_repr(),
            4 => field[31] ^= 0x80,
            5 => field[rng.gen_range(0..32)] ^= 1 << rng.gen_range(0..8),
            6 => *field = other,
            _ => *field = rng.gen(),
        }
    }

    /// Batches of valid and damaged shares get the same results as the shares alone. `RANDOM_SHARES` sets their number.
    #[test]
    fn batches_get_the_results_of_single_shares() {
        let count = std::env::var("RANDOM_SHARES").map_or(10_000, |text| text.parse().unwrap());
        let mut rng = StdRng::seed_from_u64(13);
        let (mut valid, mut checked) = (0, 0);
        while checked < count {
            let mut shares = vote(&mut rng);
            shares.extend(vote(&mut rng));
            for _ in 0..rng.gen_range(0..TWO_VOTES) {
                damage(&mut shares[rng.gen_range(0..TWO_VOTES)], &mut rng);
            }
            for _ in 0..TWO_VOTES {
                shares.swap(rng.gen_range(0..TWO_VOTES), rng.gen_range(0..TWO_VOTES));
            }
            let bodies: Vec<_> = shares.iter().map(body).collect();
            let size = rng.gen_range(1..=TWO_VOTES);
            for (bodies, shares) in bodies.chunks(size).zip(shares.chunks(size)) {
                let borrowed: Vec<_> = bodies.iter().map(|body| body.as_bytes()).collect();
                for (found, share) in read_all(&borrowed).into_iter().zip(shares) {
                    let found = found.map(|found| (found.vote_commitment, found.nullifier));
                    valid += usize::from(found.is_ok());
                    assert_eq!(found, reference(share));
                }
            }
            checked += TWO_VOTES;
        }
        assert!(valid > count / 4, "{valid} of {count}");
    }
}
