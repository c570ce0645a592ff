//! Gantry's plugin and NVIDIA's in one run: the same simulated machine, the same client, round about. NVIDIA's program is found by
//! `GANTRY_NVIDIA_BIN`; without it Gantry is measured alone. `cargo xtask bench peer` prints a table for BENCHMARKS.md.
//!
//! The binary is `$GANTRY_BINARY`, or the one built beside this program. `GANTRY_BENCH_ROUNDS` says how many rounds (5).
#![allow(clippy::print_stdout, reason = "a benchmark talks on the terminal")]

mod measure;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use gantry_e2e::peer::{self, Plugin};

use measure::{Row, Sample};

/// Samples of each row, for each program.
type Samples = BTreeMap<(Row, usize), Vec<Sample>>;

fn main() -> Result<()> {
    if let Err(why) = peer::supported() {
        println!("the plugins cannot be compared here: {why:#}");
        return Ok(());
    }
    let mut plugins = vec![Plugin::gantry()?];
    plugins.extend(Plugin::nvidia());
    let rounds = std::env::var("GANTRY_BENCH_ROUNDS");
    let rounds: u32 = rounds
        .map_or(Ok(5), |text| text.parse())
        .context("GANTRY_BENCH_ROUNDS")?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let mut samples = Samples::new();
    let measured = runtime.block_on(measure_all(&plugins, rounds, &mut samples));
    // What was measured before something failed is still worth reading.
    print(&samples);
    measured
}

async fn measure_all(plugins: &[Plugin], rounds: u32, samples: &mut Samples) -> Result<()> {
    for round in 0..rounds {
        for (number, plugin) in plugins.iter().enumerate() {
            let mut take = |row, more: Vec<Sample>| samples.entry((row, number)).or_default().extend(more);
            measure::round(plugin, &mut take)
                .await
                .with_context(|| format!("round {round}, {plugin:?}"))?;
        }
    }
    for (number, plugin) in plugins.iter().enumerate() {
        let mut take = |row, more: Vec<Sample>| samples.entry((row, number)).or_default().extend(more);
        measure::memory(plugin, &mut take)
            .await
            .with_context(|| format!("{plugin:?}"))?;
    }
    Ok(())
}

fn print(samples: &Samples) {
    println!("| | Gantry p50 | p99 | NVIDIA's p50 | p99 | NVIDIA's / Gantry, p50 |");
    println!("|---|---|---|---|---|---|");
    for row in Row::ALL {
        let of = |number| samples.get(&(row, number)).map(Vec::as_slice);
        let (ours, theirs) = (of(0), of(1));
        let ratio = match (
            ours.and_then(|some| at(some, 0.5)),
            theirs.and_then(|some| at(some, 0.5)),
        ) {
            (Some(ours), Some(theirs)) => format!("{:.2}", theirs.value() / ours.value()),
            _ => String::new(),
        };
        println!(
            "| {} | {} | {} | {ratio} |",
            row.name(),
            cells(ours),
            cells(theirs)
        );
    }
}

fn cells(samples: Option<&[Sample]>) -> String {
    let Some(samples) = samples else {
        return " | ".to_owned();
    };
    let text = |share| at(samples, share).map_or_else(String::new, Sample::text);
    // Of a few samples the last is no percentile.
    let high = if samples.len() < 20 {
        String::new()
    } else {
        text(0.99)
    };
    format!("{} | {high}", text(0.5))
}

fn at(samples: &[Sample], share: f64) -> Option<Sample> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(|one, other| one.value().total_cmp(&other.value()));
    let position = (sorted.len() as f64 * share) as usize;
    sorted.get(position.min(sorted.len().saturating_sub(1))).copied()
}

impl Sample {
    fn value(self) -> f64 {
        match self {
            Self::Time(time) => time.as_secs_f64(),
            Self::Rate(rate) => rate,
            Self::Bytes(bytes) => bytes as f64,
        }
    }

    fn text(self) -> String {
        match self {
            Self::Time(time) if time < Duration::from_millis(1) => {
                format!("{:.0} us", time.as_secs_f64() * 1e6)
            }
            Self::Time(time) => format!("{:.2} ms", time.as_secs_f64() * 1e3),
            Self::Rate(rate) => format!("{rate:.0}/s"),
            Self::Bytes(bytes) => format!("{:.1} MB", bytes as f64 / 1e6),
        }
    }
}
