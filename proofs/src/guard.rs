//! Converts panics to errors with their location, without their message.

use std::panic::{self, AssertUnwindSafe, PanicHookInfo};
use std::sync::{Mutex, PoisonError};

use crate::errors::{Error, Result};

/// Location of the last panic. Not per thread, because a prover panics on a thread of its pool.
static LAST_PANIC: Mutex<Option<String>> = Mutex::new(None);

/// Replaces the standard hook, which prints the panic's message: it may quote a witness.
pub fn install_hook() {
    panic::set_hook(Box::new(record_location));
}

fn record_location(info: &PanicHookInfo<'_>) {
    let location = info.location().map(|location| {
        // Only the end of the path, because the rest depends on the build machine.
        let mut parts: Vec<&str> = location.file().rsplit('/').take(3).collect();
        parts.reverse();
        format!("{}:{}", parts.join("/"), location.line())
    });
    *LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner) = location;
}

/// Runs `work`; a panic in it is an [`Error::Proving`].
pub fn guard<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_payload| {
        let location = LAST_PANIC
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let location = location.as_deref().unwrap_or("an unknown location");
        Err(Error::Proving(format!("internal error at {location}")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_without_its_message() {
        install_hook();
        let result: Result<()> = guard(|| panic!("the blind is 1234"));
        let text = result.unwrap_err().to_string();
        assert!(text.contains("src/guard.rs:"), "{text}");
        assert!(!text.contains("1234"), "{text}");
        assert_eq!(guard(|| Ok(7)), Ok(7));
    }
}
