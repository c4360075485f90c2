//! What can go wrong. No message quotes a value: most values here are secrets.

use std::fmt;

/// Why an encoded value was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Not the number of bytes that the field has.
    Length,
    /// An integer at or above the field's modulus.
    NonCanonical,
    /// No point of the curve has this x-coordinate.
    OffCurve,
    /// The identity, where a real point is wanted.
    Identity,
    /// An integer outside of its range.
    Range,
}

impl Reason {
    /// The word that Python callers see.
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::Length => "length",
            Reason::NonCanonical => "non-canonical",
            Reason::OffCurve => "off-curve",
            Reason::Identity => "identity",
            Reason::Range => "range",
        }
    }
}

/// A hash that must hold between the fields of one share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// `shares_hash` is the hash of `share_comms`.
    SharesHash,
    /// `share_comms[share_index]` commits to the blind and the ciphertext.
    ShareComm,
}

impl Rule {
    /// The word that Python callers see.
    pub fn as_str(self) -> &'static str {
        match self {
            Rule::SharesHash => "shares_hash",
            Rule::ShareComm => "share_comm",
        }
    }
}

/// Every failure of this crate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// A field is not a well-formed encoding; `field` is its name on the wire.
    Encoding {
        /// The field's name, with an index where it is one of several.
        field: String,
        /// What is wrong with it.
        reason: Reason,
    },
    /// The fields are well-formed, but do not belong together.
    ShareRule(Rule),
    /// Unknown circuit, key generation failed, or not the keys that the protocol names.
    Circuit(String),
    /// The prover could not make a proof, or code of this crate panicked.
    Proving(String),
    /// A position or size that the tree does not have, or data that cannot be a tree.
    Tree(String),
    /// A tally above the limit of the search.
    Decryption(String),
}

impl Error {
    /// An encoding error; the name is only formatted when there is one.
    pub fn encoding(field: impl fmt::Display, reason: Reason) -> Self {
        Error::Encoding {
            field: field.to_string(),
            reason,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Encoding { field, reason } => write!(f, "{field}: {}", reason.as_str()),
            Error::ShareRule(rule) => write!(f, "{} does not hold", rule.as_str()),
            Error::Circuit(text)
            | Error::Proving(text)
            | Error::Tree(text)
            | Error::Decryption(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for Error {}

/// The result of everything fallible here.
pub type Result<T> = std::result::Result<T, Error>;
