//! The keyed check at the end of every row of a database: whether its bytes are those that were written.

use blake2b_simd::Params;

/// Bytes of a check.
pub const CHECK: usize = 8;
/// Bytes of the longest key.
pub const LONGEST_KEY: usize = blake2b_simd::KEYBYTES;

/// The columns of a row, gathered for its check: their kinds, all integers, all lengths, all texts. No two rows make the
/// same of it.
pub struct Row {
    kinds: Vec<u8>,
    numbers: Vec<u8>,
    blob_lengths: Vec<u8>,
    text_lengths: Vec<u8>,
    blobs: Vec<u8>,
    texts: Vec<u8>,
}

impl Default for Row {
    /// Without columns yet, and with room for those of a share.
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
    /// Adds a column without a value.
    pub fn nothing(&mut self) {
        self.kinds.push(b'n');
    }

    /// Adds an integer.
    pub fn number(&mut self, value: i64) {
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

    /// Keyed BLAKE2b over all of it; a key has at most `LONGEST_KEY` bytes.
    pub fn check(&self, key: &[u8]) -> [u8; CHECK] {
        let hash = Params::new()
            .hash_length(CHECK)
            .key(key)
            .personal(b"svote-row")
            .to_state()
            .update(format!("{}:", self.kinds.len()).as_bytes())
            .update(&self.kinds)
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
