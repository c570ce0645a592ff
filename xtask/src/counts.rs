//! Counts of tests, read from the closing lines of the test runner and added up over its many binaries.

use std::ops::AddAssign;

use anyhow::{Result, bail};

/// How many tests passed, failed and were skipped.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

impl Counts {
    /// Adds the counts of one line of output; other lines have none.
    ///
    /// The line is libtest's: `test result: ok. 6 passed; 0 failed; 1 ignored; 0 measured; ...`.
    pub(crate) fn read(&mut self, line: &str) {
        let Some((_, tail)) = line.split_once("test result: ").and_then(|(_, rest)| rest.split_once(". "))
        else {
            return;
        };
        for part in tail.split(';') {
            match part.trim().split_once(' ') {
                Some((number, "passed")) => self.passed += number.parse().unwrap_or(0),
                Some((number, "failed")) => self.failed += number.parse().unwrap_or(0),
                Some((number, "ignored")) => self.skipped += number.parse().unwrap_or(0),
                _ => {}
            }
        }
    }

    /// These counts, with a failure if the run failed and none is counted: a test binary that did not build or died
    /// prints no closing line.
    pub(crate) fn of_run(self, succeeded: bool) -> Self {
        let failed = if succeeded { self.failed } else { self.failed.max(1) };
        Self { failed, ..self }
    }

    /// Prints the closing line, and fails if a test failed or none ran.
    pub(crate) fn conclude(self) -> Result<()> {
        let Self { passed, failed, skipped } = self;
        println!("\n{passed} passed, {failed} failed, {skipped} skipped");
        if failed > 0 {
            bail!("{failed} tests failed");
        }
        if passed == 0 {
            bail!("no test ran");
        }
        Ok(())
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_are_added_up() {
        let mut counts = Counts::default();
        counts.read(
            "test result: ok. 6 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s",
        );
        counts.read(
            "test result: FAILED. 2 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1s",
        );
        counts.read("test machine::tests::contradiction ... ok");
        assert_eq!(counts, Counts { passed: 8, failed: 3, skipped: 1 });
    }

    #[test]
    fn run_without_tests_fails() {
        assert!(Counts::default().conclude().is_err());
    }
}
