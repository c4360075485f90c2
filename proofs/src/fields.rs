//! Strict decoding of field elements and points. All external input is decoded here.

use std::fmt::Display;

use ff::PrimeField;
use group::{prime::PrimeCurveAffine, GroupEncoding};
use pasta_curves::{
    arithmetic::{Coordinates, CurveAffine},
    pallas,
};

use crate::errors::{Error, Reason, Result};

/// An element of the Pallas base field.
pub type Base = pallas::Base;
/// An element of the Pallas scalar field.
pub type Scalar = pallas::Scalar;
/// A field element or a compressed point on the wire.
pub type Encoded = [u8; 32];
/// Bytes of one [`Encoded`].
pub const ELEMENT: usize = 32;

/// A point of Pallas that is not the identity.
#[derive(Clone, Copy)]
pub struct Point<W = Base> {
    /// x-coordinate.
    pub x: W,
    /// y-coordinate.
    pub y: W,
}

/// A canonical base field element.
pub fn base(field: impl Display, bytes: &[u8]) -> Result<Base> {
    let bytes = match bytes.try_into() {
        Ok(bytes) => bytes,
        Err(_) => return Err(Error::encoding(field, Reason::Length)),
    };
    Option::from(Base::from_repr(bytes)).ok_or_else(|| Error::encoding(field, Reason::NonCanonical))
}

/// Any number of concatenated canonical base field elements. Errors name `field[i]`.
pub fn bases(field: &str, bytes: &[u8]) -> Result<Vec<Base>> {
    if !bytes.len().is_multiple_of(ELEMENT) {
        return Err(Error::encoding(field, Reason::Length));
    }
    bytes
        .chunks_exact(ELEMENT)
        .enumerate()
        .map(|(i, chunk)| base(format_args!("{field}[{i}]"), chunk))
        .collect()
}

/// Exactly `N` concatenated canonical base field elements. Errors name `field[i]`.
pub fn base_array<const N: usize>(field: &str, bytes: &[u8]) -> Result<[Base; N]> {
    if bytes.len() != N * ELEMENT {
        return Err(Error::encoding(field, Reason::Length));
    }
    let elements = bases(field, bytes)?;
    elements
        .try_into()
        .map_err(|_| Error::encoding(field, Reason::Length))
}

/// A canonical scalar.
pub fn scalar(field: impl Display, bytes: &[u8]) -> Result<Scalar> {
    let bytes = match bytes.try_into() {
        Ok(bytes) => bytes,
        Err(_) => return Err(Error::encoding(field, Reason::Length)),
    };
    Option::from(Scalar::from_repr(bytes))
        .ok_or_else(|| Error::encoding(field, Reason::NonCanonical))
}

/// A compressed point, the identity (all zero) included.
pub fn affine(field: impl Display, bytes: &[u8]) -> Result<pallas::Affine> {
    let Ok(bytes) = <Encoded>::try_from(bytes) else {
        return Err(Error::encoding(field, Reason::Length));
    };
    if let Some(point) = Option::from(pallas::Affine::from_bytes(&bytes)) {
        return Ok(point);
    }
    let mut x = bytes;
    x[31] &= 0x7f;
    let canonical = bool::from(Base::from_repr(x).is_some());
    let reason = if canonical {
        Reason::OffCurve
    } else {
        Reason::NonCanonical
    };
    Err(Error::encoding(field, reason))
}

/// A compressed point that is not the identity.
pub fn point(field: impl Display + Copy, bytes: &[u8]) -> Result<Point> {
    let affine = affine(field, bytes)?;
    if bool::from(affine.is_identity()) {
        return Err(Error::encoding(field, Reason::Identity));
    }
    let coordinates: Option<Coordinates<pallas::Affine>> = Option::from(affine.coordinates());
    match coordinates {
        Some(c) => Ok(Point {
            x: *c.x(),
            y: *c.y(),
        }),
        None => Err(Error::encoding(field, Reason::Identity)),
    }
}

/// An integer below `limit`. `None` is an integer that does not fit into 64 bits.
pub fn below(field: impl Display, value: Option<u64>, limit: u64) -> Result<u64> {
    match value {
        Some(value) if value < limit => Ok(value),
        _ => Err(Error::encoding(field, Reason::Range)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ff::Field;

    fn reason<T>(result: Result<T>) -> Reason {
        match result {
            Err(Error::Encoding { reason, .. }) => reason,
            _ => panic!("no encoding error"),
        }
    }

    fn modulus() -> Encoded {
        let mut bytes = (-Base::ONE).to_repr();
        bytes[0] += 1;
        bytes
    }

    #[test]
    fn elements_are_canonical_and_of_full_length() {
        assert!(base("f", &(-Base::ONE).to_repr()).is_ok());
        assert_eq!(reason(base("f", &modulus())), Reason::NonCanonical);
        assert_eq!(reason(base("f", &[0xff; 32])), Reason::NonCanonical);
        for length in [0, 31, 33] {
            assert_eq!(reason(base("f", &vec![0; length])), Reason::Length);
        }
    }

    #[test]
    fn errors_name_the_index() {
        let mut bytes = [0u8; 96];
        bytes[64..].copy_from_slice(&[0xff; 32]);
        let error = bases("leaf", &bytes).unwrap_err();
        assert_eq!(error, Error::encoding("leaf[2]", Reason::NonCanonical));
        assert_eq!(reason(base_array::<2>("leaf", &bytes)), Reason::Length);
    }

    #[test]
    fn points_are_on_the_curve_and_not_the_identity() {
        let good = pallas::Affine::generator().to_bytes();
        assert!(point("c1", &good).is_ok());
        assert_eq!(reason(point("c1", &[0; 32])), Reason::Identity);
        assert_eq!(reason(point("c1", &[0xff; 32])), Reason::NonCanonical);
        let off_curve = (1u8..)
            .map(|x| {
                let mut bytes = [0; 32];
                bytes[0] = x;
                bytes
            })
            .find(|bytes| bool::from(pallas::Affine::from_bytes(bytes).is_none()));
        assert_eq!(reason(point("c1", &off_curve.unwrap())), Reason::OffCurve);
    }
}
