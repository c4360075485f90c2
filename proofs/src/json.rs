//! Strict JSON (RFC 8259) as a tree that borrows the text. An error is the offset of the first invalid byte.
//!
//! Also invalid: lone surrogates, numbers outside the range of a double, and more than [`MAX_DEPTH`] nested values.
//! Offsets of errors are part of the interface: they determine which field an error message contains.

use std::borrow::Cow;

use crate::steps::count_steps;

/// Maximum nesting of arrays and objects.
pub const MAX_DEPTH: usize = 1024;

/// Offset of an error; the end of the text if the text is truncated.
pub type Offset = usize;
type Result<T> = std::result::Result<T, Offset>;

/// A value.
#[derive(Debug, PartialEq)]
pub enum Json<'a> {
    /// `null`.
    Null,
    /// An integer of 64 bits, signed or unsigned.
    Integer(i128),
    /// A string without its escapes.
    Text(Cow<'a, str>),
    /// An array.
    Array(Vec<Json<'a>>),
    /// An object, with repeated names.
    Object(Vec<(Cow<'a, str>, Json<'a>)>),
    /// A boolean, or any other number.
    Other,
}

/// Parses a document.
pub fn parse(text: &str) -> Result<Json<'_>> {
    let mut parser = Parser { text, at: 0 };
    parser.skip_space();
    let value = parser.value(1)?;
    parser.skip_space();
    match parser.peek() {
        None => Ok(value),
        Some(_) => Err(parser.at),
    }
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<u8> {
        count_steps(1);
        self.text.as_bytes().get(self.at).copied()
    }

    fn skip_space(&mut self) {
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.peek() {
            self.at += 1;
        }
    }

    /// Parses a value. `depth` is its nesting if it is an array or an object.
    fn value(&mut self, depth: usize) -> Result<Json<'a>> {
        match self.peek() {
            Some(b'"') => self.string().map(Json::Text),
            Some(b'-' | b'0'..=b'9') => self.number(),
            Some(b'{') => self.object(depth),
            Some(b'[') => self.array(depth),
            Some(b'n') => self.literal("null", Json::Null),
            Some(b't') => self.literal("true", Json::Other),
            Some(b'f') => self.literal("false", Json::Other),
            _ => Err(self.at),
        }
    }

    fn literal(&mut self, literal: &str, value: Json<'a>) -> Result<Json<'a>> {
        if !self.text.as_bytes()[self.at..].starts_with(literal.as_bytes()) {
            return Err(self.at);
        }
        self.at += literal.len();
        Ok(value)
    }

    fn array(&mut self, depth: usize) -> Result<Json<'a>> {
        self.open(depth)?;
        let mut entries = Vec::new();
        let mut more = !self.closes(b']');
        while more {
            entries.push(self.value(depth + 1)?);
            more = self.separator(b']')?;
        }
        Ok(Json::Array(entries))
    }

    fn object(&mut self, depth: usize) -> Result<Json<'a>> {
        self.open(depth)?;
        let mut members = Vec::new();
        let mut more = !self.closes(b'}');
        while more {
            if self.peek() != Some(b'"') {
                return Err(self.at);
            }
            let name = self.string()?;
            self.skip_space();
            if self.peek() != Some(b':') {
                return Err(self.at);
            }
            self.at += 1;
            self.skip_space();
            members.push((name, self.value(depth + 1)?));
            more = self.separator(b'}')?;
        }
        Ok(Json::Object(members))
    }

    /// Skips the opening bracket and white space.
    fn open(&mut self, depth: usize) -> Result<()> {
        self.at += 1;
        if depth > MAX_DEPTH {
            return Err(self.at);
        }
        self.skip_space();
        Ok(())
    }

    /// Skips the closing bracket if it is next.
    fn closes(&mut self, bracket: u8) -> bool {
        let closes = self.peek() == Some(bracket);
        self.at += usize::from(closes);
        closes
    }

    /// Skips a comma or the closing bracket; returns whether another entry must follow. The error of a comma before
    /// the bracket is at the comma.
    fn separator(&mut self, bracket: u8) -> Result<bool> {
        self.skip_space();
        if self.closes(bracket) {
            return Ok(false);
        }
        if self.peek() != Some(b',') {
            return Err(self.at);
        }
        let comma = self.at;
        self.at += 1;
        self.skip_space();
        if self.peek() == Some(bracket) {
            return Err(comma);
        }
        Ok(true)
    }

    fn number(&mut self) -> Result<Json<'a>> {
        let start = self.at;
        self.at += usize::from(self.peek() == Some(b'-'));
        let leading_zero = self.peek() == Some(b'0');
        if self.digits()? > 1 && leading_zero {
            return Err(start);
        }
        let mut is_integer = true;
        if self.peek() == Some(b'.') {
            is_integer = false;
            self.at += 1;
            self.digits()?;
        }
        if let Some(b'e' | b'E') = self.peek() {
            is_integer = false;
            self.at += 1;
            self.at += usize::from(matches!(self.peek(), Some(b'+' | b'-')));
            self.digits()?;
        }
        let number = &self.text[start..self.at];
        count_steps(number.len());
        if is_integer {
            if let Ok(value @ I64_MIN..=U64_MAX) = number.parse() {
                return Ok(Json::Integer(value));
            }
        }
        match number.parse::<f64>() {
            Ok(value) if value.is_finite() => Ok(Json::Other),
            _ => Err(start),
        }
    }

    /// Skips at least one digit; returns how many.
    fn digits(&mut self) -> Result<usize> {
        let start = self.at;
        while let Some(b'0'..=b'9') = self.peek() {
            self.at += 1;
        }
        match self.at - start {
            0 => Err(self.at),
            count => Ok(count),
        }
    }

    fn string(&mut self) -> Result<Cow<'a, str>> {
        self.at += 1;
        let plain = self.plain_characters()?;
        if self.closes(b'"') {
            return Ok(Cow::Borrowed(plain));
        }
        let mut unescaped = plain.to_owned();
        while !self.closes(b'"') {
            unescaped.push(self.escape()?);
            unescaped.push_str(self.plain_characters()?);
        }
        Ok(Cow::Owned(unescaped))
    }

    /// Skips characters up to a quote or an escape.
    fn plain_characters(&mut self) -> Result<&'a str> {
        let start = self.at;
        let rest = &self.text.as_bytes()[start..];
        let special = |byte: &u8| *byte == b'"' || *byte == b'\\' || *byte < b' ';
        let length = rest.iter().position(special).unwrap_or(rest.len());
        count_steps(length + 1);
        if length == rest.len() {
            return Err(self.text.len());
        }
        self.at += length;
        match rest[length] {
            b'"' | b'\\' => Ok(&self.text[start..self.at]),
            _ => Err(self.at), // a control character
        }
    }

    /// Parses an escape. Its errors are at the backslash.
    fn escape(&mut self) -> Result<char> {
        let start = self.at;
        count_steps(1);
        let kind = *self.text.as_bytes().get(start + 1).ok_or(self.text.len())?;
        self.at += 2;
        let character = match kind {
            b'"' | b'\\' | b'/' => Some(char::from(kind)),
            b'b' => Some('\u{8}'),
            b'f' => Some('\u{c}'),
            b'n' => Some('\n'),
            b'r' => Some('\r'),
            b't' => Some('\t'),
            b'u' => self.unicode_escape(),
            _ => None,
        };
        character.ok_or(start)
    }

    /// Parses what follows `\u`; both halves of a surrogate pair.
    fn unicode_escape(&mut self) -> Option<char> {
        let first = self.code_unit()?;
        if !matches!(first, 0xd800..=0xdbff) {
            return char::from_u32(first.into());
        }
        if !self.text.as_bytes()[self.at..].starts_with(b"\\u") {
            return None;
        }
        self.at += 2;
        let pair = [first, self.code_unit()?];
        char::decode_utf16(pair).next()?.ok()
    }

    fn code_unit(&mut self) -> Option<u16> {
        let digits = self.text.as_bytes().get(self.at..self.at + 4)?;
        self.at += 4;
        digits.iter().try_fold(0, |unit, digit| {
            Some(unit << 4 | char::from(*digit).to_digit(16)? as u16)
        })
    }
}

const I64_MIN: i128 = i64::MIN as i128;
const U64_MAX: i128 = u64::MAX as i128;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::steps::require_linear;

    fn text(text: &str) -> Json<'_> {
        Json::Text(text.into())
    }

    #[test]
    fn values_are_parsed() {
        assert_eq!(
            parse(" {\"a\" : [null,-0, 18446744073709551615,\n1.0],\"\\u0061\":{}}\t"),
            Ok(Json::Object(vec![
                (
                    "a".into(),
                    Json::Array(vec![
                        Json::Null,
                        Json::Integer(0),
                        Json::Integer(u64::MAX.into()),
                        Json::Other
                    ])
                ),
                ("a".into(), Json::Object(vec![])),
            ]))
        );
        for other in ["true", "false", "18446744073709551616", "1e-999", "-0.0"] {
            assert_eq!(parse(other), Ok(Json::Other), "{other}");
        }
    }

    #[test]
    fn escapes_are_decoded() {
        assert_eq!(parse(r#""\/é\n\"x""#), Ok(text("/é\n\"x")));
        assert_eq!(parse(r#""\ud83d\uDE00\u0000""#), Ok(text("😀\0")));
    }

    #[test]
    fn errors_have_their_offset() {
        let cases = [
            ("", 0),
            ("  ", 2),
            ("{} x", 3),
            ("[1 , ]", 3),
            (r#"{"a":1,}"#, 6),
            (r#"{"a":1,"#, 7),
            (r#"{"a" 1}"#, 5),
            (r#"{"a":1 "b":2}"#, 7),
            (r#"{,}"#, 1),
            (r#"[1}"#, 2),
            (r#"["a,b"#, 5),
            (r#"["a\q"]"#, 3),
            (r#"["\ud800"]"#, 2),
            (r#"["\ud800\u0041"]"#, 2),
            (r#"["\udc00"]"#, 2),
            (r#"["\u+123"]"#, 2),
            ("[\"a\n\"]", 3),
            ("[1e999]", 1),
            ("[01]", 1),
            ("[truu]", 1),
        ];
        for (document, offset) in cases {
            assert_eq!(parse(document), Err(offset), "{document}");
        }
    }

    #[test]
    fn twice_the_input_takes_twice_the_steps() {
        let nested = |count| "[{\"a\":".repeat(count);
        let depth = MAX_DEPTH / 4; // so that twice the input is not refused for its depth
        require_linear("nesting", depth, |count| drop(parse(&nested(count))));
        let cases = [
            ("space", "", " ", ""),
            ("array", "[", "0,", ""),
            ("arrays", "[", "[],", "0]"),
            ("object", "{", "\"\":0,", "\"\":0}"),
            ("literals", "[", "null,", "true"),
            ("digits", "", "9", ""),
            ("fraction", "0.", "1", "e"),
            ("exponent", "1e", "1", ""),
            ("string", "\"", "é", "\""),
            ("open string", "[\"", "a", ""),
            ("escapes", "\"", "\\\"", "\""),
            ("open escapes", "{\"", "\\\"", ""),
            ("code units", "\"", "\\u0041", "\""),
            ("surrogates", "\"", "\\ud83d\\ude00", "\\ud83d\""),
        ];
        for (name, start, repeated, end) in cases {
            require_linear(name, 4000, |count| {
                drop(parse(&format!("{start}{}{end}", repeated.repeat(count))));
            });
        }
    }

    #[test]
    fn nesting_is_limited() {
        let nested = |depth| "[".repeat(depth) + &"]".repeat(depth);
        assert!(parse(&nested(MAX_DEPTH)).is_ok());
        assert_eq!(parse(&nested(MAX_DEPTH + 1)), Err(MAX_DEPTH + 1));
    }
}
