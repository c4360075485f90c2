//! Panics become errors, and say where they happened but not what they said.

use std::panic::{self, AssertUnwindSafe, PanicHookInfo};
use std::sync::{Mutex, PoisonError};

use crate::errors::{Error, Result};

/// Where the last panic was. A prover's panic happens on a thread of its pool, so this is not per thread.
static LAST_PANIC: Mutex<Option<String>> = Mutex::new(None);

/// Replaces the standard hook, which would print the panic's message, and a message may quote a witness.
pub fn install_hook() {
    panic::set_hook(Box::new(remember));
}

fn remember(info: &PanicHookInfo<'_>) {
    let place = info.location().map(|location| {
        // Only the end of the path: the rest is the build machine's business.
        let mut parts: Vec<&str> = location.file().rsplit('/').take(3).collect();
        parts.reverse();
        format!("{}:{}", parts.join("/"), location.line())
    });
    *LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner) = place;
}

/// Runs `work`; a panic in it is an [`Error::Proving`].
pub fn guard<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_payload| {
        let place = LAST_PANIC
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let place = place.as_deref().unwrap_or("an unknown place");
        Err(Error::Proving(format!("internal error at {place}")))
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
