//! Counts of tests, read from the closing lines of the test runner and added up over its many binaries, and what those
//! that failed printed.

use std::ops::AddAssign;

use anyhow::{Result, bail};

/// Most lines that are kept of what failed tests print.
const MAX_LINES: usize = 400;

/// How many tests passed, failed and were skipped.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
    /// What failed tests printed.
    failures: Vec<String>,
    /// Whether what failed tests printed is being read.
    in_failures: bool,
}

impl Counts {
    /// Reads one line of libtest's output: the counts of `test result: ok. 6 passed; 0 failed; 1 ignored; 0 measured; ...`,
    /// or what failed tests printed, which stands between two lines `failures:`.
    pub(crate) fn read(&mut self, line: &str) {
        if line == "failures:" {
            self.in_failures = !self.in_failures;
        } else if self.in_failures && self.failures.len() < MAX_LINES {
            self.failures.push(line.to_owned());
        }
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

    /// Prints what failed tests printed, then the closing line, and fails if a test failed or none ran.
    pub(crate) fn conclude(self) -> Result<()> {
        let Self { passed, failed, skipped, failures, .. } = self;
        if !failures.is_empty() {
            println!("\n== failures\n{}", failures.join("\n"));
        }
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
        let left = MAX_LINES.saturating_sub(self.failures.len());
        self.failures.extend(other.failures.into_iter().take(left));
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
        assert_eq!(counts, Counts { passed: 8, failed: 3, skipped: 1, ..Counts::default() });
    }

    #[test]
    fn output_of_failed_tests_is_kept_once() {
        let output = "running 2 tests\ntest a ... ok\ntest b ... FAILED\n\nfailures:\n\n---- b stdout ----\nwrong\n\n\
            failures:\n    b\n\ntest result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured";
        let mut all = Counts::default();
        for _ in 0..2 {
            let mut counts = Counts::default();
            output.lines().for_each(|line| counts.read(line));
            all += counts;
        }
        assert_eq!(all.failures, ["", "---- b stdout ----", "wrong", ""].repeat(2));
        assert_eq!((all.passed, all.failed), (2, 2));
    }

    #[test]
    fn run_without_tests_fails() {
        assert!(Counts::default().conclude().is_err());
    }
}
