//! Keyed check of a database row, stored in the row: detects changed bytes.

use blake2b_simd::Params;

/// Bytes of a check.
pub const CHECK: usize = 8;
/// Maximum bytes of a key.
pub const MAX_KEY: usize = blake2b_simd::KEYBYTES;

/// Injective encoding of a row's columns for its check: types, integers, lengths, texts.
pub struct Row {
    kinds: Vec<u8>,
    numbers: Vec<u8>,
    blob_lengths: Vec<u8>,
    text_lengths: Vec<u8>,
    blobs: Vec<u8>,
    texts: Vec<u8>,
}

impl Default for Row {
    /// Creates an empty encoding with capacity for the columns of a share.
    fn default() -> Self {
        Row {
            kinds: Vec::with_capacity(32),
            numbers: Vec::with_capacity(16 * 8),
            blob_lengths: Vec::with_capacity(16 * 8),
            text_lengths: Vec::with_capacity(4 * 8),
            blobs: Vec::with_capacity(1024),
            texts: Vec::with_capacity(64),
        }
    }
}

impl Row {
    /// Adds NULL.
    pub fn null(&mut self) {
        self.kinds.push(b'n');
    }

    /// Adds an integer.
    pub fn integer(&mut self, value: i64) {
        self.kinds.push(b'i');
        self.numbers.extend(value.to_be_bytes());
    }

    /// Adds bytes.
    pub fn blob(&mut self, value: &[u8]) {
        self.kinds.push(b'b');
        self.blob_lengths.extend((value.len() as i64).to_be_bytes());
        self.blobs.extend(value);
    }

    /// Adds a text.
    pub fn text(&mut self, value: &[u8]) {
        self.kinds.push(b's');
        self.text_lengths.extend((value.len() as i64).to_be_bytes());
        self.texts.extend(value);
    }

    /// Keyed BLAKE2b of the encoding without the NULLs at its end; a key has at most `MAX_KEY` bytes.
    pub fn check(&self, key: &[u8]) -> [u8; CHECK] {
        let last = self.kinds.iter().rposition(|kind| *kind != b'n');
        let kinds = &self.kinds[..last.map_or(0, |index| index + 1)];
        let hash = Params::new()
            .hash_length(CHECK)
            .key(key)
            .personal(b"svote-row")
            .to_state()
            .update(format!("{}:", kinds.len()).as_bytes())
            .update(kinds)
            .update(&self.numbers)
            .update(&self.blob_lengths)
            .update(&self.text_lengths)
            .update(&self.blobs)
            .update(&self.texts)
            .finalize();
        let mut check = [0; CHECK];
        check.copy_from_slice(hash.as_bytes());
        check
    }
}
