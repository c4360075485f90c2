//! Counts the steps of the parsers in tests, which require that twice the input takes twice the steps.

/// Counts steps that take constant time each. Does nothing outside of tests.
#[inline(always)]
pub fn count_steps(_steps: usize) {
    #[cfg(test)]
    counter::STEPS.set(counter::STEPS.get() + _steps);
}

/// Fails unless `work` takes at most twice the steps, and some constant, for an input of twice the size.
#[cfg(test)]
pub fn require_linear(name: &str, size: usize, work: impl Fn(usize)) {
    let measure = |size| {
        counter::STEPS.set(0);
        work(size);
        counter::STEPS.get()
    };
    let (steps, doubled) = (measure(size), measure(2 * size));
    assert!(steps >= size / 8, "{name}: {steps} steps for size {size}");
    assert!(
        doubled <= 2 * steps + 200,
        "{name}: {steps} steps, {doubled} for twice the input"
    );
}

#[cfg(test)]
mod counter {
    use std::cell::Cell;

    thread_local! {
        pub static STEPS: Cell<usize> = const { Cell::new(0) };
    }
}
