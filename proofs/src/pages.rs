//! Pages of a SQLite file: the unused gap of a page, and pages of a write-ahead log whose gap contains data.
//!
//! The formats are SQLite's, <https://www.sqlite.org/fileformat2.html>, sections 1.6 and 4.1.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Length of the WAL's header, which changes whenever the WAL is restarted.
pub const LOG_HEADER: usize = 32;
/// Length of a frame's header, whose first four bytes are the page number; the page follows.
const FRAME_HEADER: usize = 24;
/// Length of the database header, which precedes the b-tree page in the file's first page.
const FILE_HEADER: usize = 100;
/// Frames per read, so that the data fits into a core's cache.
const FRAMES_PER_READ: u64 = 16;

/// The gap between a b-tree page's cell pointers and its first cell. `None` for other pages and damaged ones.
pub fn gap(page: &[u8], number: u32) -> Option<Range<usize>> {
    let head = if number == 1 { FILE_HEADER } else { 0 };
    let header = page.get(head..head + 8)?;
    let read_u16 = |at: usize| usize::from(u16::from_be_bytes([header[at], header[at + 1]]));
    let length = match header[0] {
        2 | 5 => 12,  // interior pages
        10 | 13 => 8, // leaves
        _ => return None,
    };
    let start = head + length + 2 * read_u16(3);
    let end = match read_u16(5) {
        0 => 65536,
        content => content,
    };
    (start <= end && end <= page.len()).then_some(start..end)
}

/// For each page in a range of frames: whether the gap of its newest copy contains non-zero bytes.
///
/// Fails if the file is shorter than the range.
pub fn in_log(path: &Path, frames: Range<u64>, page_size: usize) -> io::Result<HashMap<u32, bool>> {
    let file = File::open(path)?;
    let frame_size = FRAME_HEADER + page_size;
    let mut buffer = Vec::new();
    let mut is_stale = HashMap::new();
    let mut first = frames.start;
    while first < frames.end {
        let count = FRAMES_PER_READ.min(frames.end - first);
        buffer.resize(frame_size * count as usize, 0);
        file.read_exact_at(&mut buffer, LOG_HEADER as u64 + first * frame_size as u64)
            .map_err(describe_read_error)?;
        for frame in buffer.chunks_exact(frame_size) {
            let (header, page) = frame.split_at(FRAME_HEADER);
            let number = u32::from_be_bytes([header[0], header[1], header[2], header[3]]);
            let stale =
                gap(page, number).is_some_and(|gap| page[gap].iter().any(|&byte| byte != 0));
            is_stale.insert(number, stale);
        }
        first += count;
    }
    Ok(is_stale)
}

fn describe_read_error(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => {
            io::Error::other("the write-ahead log is shorter than the requested frames")
        }
        _ => error,
    }
}
