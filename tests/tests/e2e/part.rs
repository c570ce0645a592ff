//! The part of the scenarios that a run plays: CI plays two parts at once, each on a cluster of its own.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

/// `1-2/3`: of every three scenarios the first two.
const VARIABLE: &str = "GANTRY_PART";
/// The port of the API server of a run that plays everything, and that of one that plays part 0.
const PORT: u16 = 16444;
const PORT_OF_PARTS: u16 = 16460;

/// Which scenarios are played, by their positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    /// The first and the last of so many, from 1.
    first: u16,
    last: u16,
    of: u16,
}

impl Part {
    /// All scenarios.
    const WHOLE: Self = Self { first: 1, last: 1, of: 1 };

    /// The part that `GANTRY_PART` names, or all scenarios.
    ///
    /// # Errors
    /// The variable has another form.
    pub(crate) fn selected() -> Result<Self> {
        std::env::var(VARIABLE).map_or(Ok(Self::WHOLE), |text| {
            Self::read(&text)
                .with_context(|| format!("{VARIABLE}={text}: write FIRST-LAST/OF, such as 1-2/3"))
        })
    }

    fn read(text: &str) -> Result<Self> {
        let (range, of) = text.split_once('/').context("no `/`")?;
        let (first, last) = range.split_once('-').context("no `-`")?;
        let part = Self { first: first.parse()?, last: last.parse()?, of: of.parse()? };
        ensure!(1 <= part.first && part.first <= part.last && part.last <= part.of, "no part of it");
        Ok(part)
    }

    /// Whether the scenario at a position, from 0, is part of it.
    pub(crate) fn has(self, position: usize) -> bool {
        let own = position % usize::from(self.of) + 1;
        (usize::from(self.first)..=usize::from(self.last)).contains(&own)
    }

    /// A path in the folder of temporary files that no other part has.
    pub(crate) fn path(self, name: &str, extension: &str) -> PathBuf {
        let part = if self == Self::WHOLE { String::new() } else { format!("-{}", self.first) };
        std::env::temp_dir().join(format!("{name}{part}{extension}"))
    }

    /// The port of the API server.
    pub(crate) fn port(self) -> u16 {
        if self == Self::WHOLE { PORT } else { PORT_OF_PARTS.saturating_add(self.first) }
    }
}
