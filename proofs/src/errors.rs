//! Errors. Messages never quote a value, because most values are secret.

use std::fmt;

/// Why an encoded value is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Wrong number of bytes.
    Length,
    /// An integer at or above the field's modulus.
    NonCanonical,
    /// No point of the curve has this x-coordinate.
    OffCurve,
    /// The identity, which is not allowed here.
    Identity,
    /// An integer that is out of range.
    Range,
}

impl Reason {
    /// Identifier of the reason in Python.
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

/// A hash that the fields of one share must match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// `shares_hash` is the hash of `share_comms`.
    SharesHash,
    /// `share_comms[share_index]` commits to the blind and the ciphertext.
    ShareComm,
}

impl Rule {
    /// Identifier of the reason in Python.
    pub fn as_str(self) -> &'static str {
        match self {
            Rule::SharesHash => "shares_hash",
            Rule::ShareComm => "share_comm",
        }
    }
}

/// All errors of this crate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// A field is not a well-formed encoding; `field` is its name on the wire.
    Encoding {
        /// The field's name, with an index for an element of an array.
        field: String,
        /// Why it is invalid.
        reason: Reason,
    },
    /// The fields are well-formed, but do not match each other.
    ShareRule(Rule),
    /// Unknown circuit, key generation failed, or wrong fingerprint.
    Circuit(String),
    /// Proving failed, or code of this crate panicked.
    Proving(String),
    /// Invalid position or size, or invalid tree data.
    Tree(String),
    /// A decrypted value above the limit of the search.
    Decryption(String),
}

impl Error {
    /// Creates an encoding error. The name is formatted only on error.
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
            Error::ShareRule(rule) => write!(f, "{} does not match", rule.as_str()),
            Error::Circuit(text)
            | Error::Proving(text)
            | Error::Tree(text)
            | Error::Decryption(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for Error {}

/// Result type of this crate.
pub type Result<T> = std::result::Result<T, Error>;
