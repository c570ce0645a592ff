//! Gantry's plugin and others in one run: the same simulated machine and client, in turn. The others are a minimal
//! plugin on grpc-go with precomputed replies (`components/bare`, built if Go is available) and NVIDIA's program, if
//! `GANTRY_NVIDIA_BIN` names its folder. `cargo xtask bench peer` prints a table for BENCHMARKS.md.
//!
//! The binary is `$GANTRY_BINARY`, or the one built next to this program. `GANTRY_BENCH_ROUNDS` is the number of rounds
//! (10); 0 measures memory only. `GANTRY_BENCH_ONLY=calls` omits memory.
#![allow(clippy::print_stdout, reason = "a benchmark talks on the terminal")]

mod caller;
mod measure;
mod memory;
mod row;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use gantry_e2e::peer::{self, Plugin};

use row::{Row, Sample};

/// Samples of each row, for each program.
type Samples = BTreeMap<(Row, usize), Vec<Sample>>;

fn main() -> Result<()> {
    if let Err(why) = peer::supported() {
        println!("the plugins cannot be compared here: {why:#}");
        return Ok(());
    }
    let mut plugins = vec![("Gantry", Plugin::gantry()?)];
    match Plugin::bare() {
        Ok(bare) => plugins.push(("grpc-go, fixed reply", bare)),
        Err(why) => println!("no plugin on grpc-go to compare with: {why:#}"),
    }
    plugins.extend(Plugin::nvidia().map(|nvidia| ("NVIDIA's", nvidia)));
    let rounds = std::env::var("GANTRY_BENCH_ROUNDS");
    let rounds: usize = rounds.map_or(Ok(10), |text| text.parse()).context("GANTRY_BENCH_ROUNDS")?;
    let only_calls = std::env::var("GANTRY_BENCH_ONLY").is_ok_and(|what| what == "calls");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut samples = Samples::new();
    let measured = runtime.block_on(measure_all(&plugins, rounds, !only_calls, &mut samples));
    // What was measured before something failed is still worth reading.
    let names: Vec<&str> = plugins.iter().map(|(name, _)| *name).collect();
    print(&names, &samples);
    measured
}

async fn measure_all(
    plugins: &[(&str, Plugin)],
    rounds: usize,
    memory: bool,
    samples: &mut Samples,
) -> Result<()> {
    for round in 0..rounds {
        for turn in 0..plugins.len() {
            // Each is first as often as any other: a machine may be quicker at one moment than at the next.
            let number = (round + turn) % plugins.len();
            let (name, plugin) = &plugins[number];
            let mut take = |row, more: Vec<Sample>| samples.entry((row, number)).or_default().extend(more);
            measure::round(plugin, &mut take).await.with_context(|| format!("round {round}, {name}"))?;
        }
    }
    if !memory {
        return Ok(());
    }
    for (number, (name, plugin)) in plugins.iter().enumerate() {
        let mut take = |row, more: Vec<Sample>| samples.entry((row, number)).or_default().extend(more);
        memory::all(plugin, &mut take).await.with_context(|| (*name).to_owned())?;
    }
    Ok(())
}

/// A line for each row: p50 and p99 of each program, and ours as a multiple of each of the others'.
fn print(names: &[&str], samples: &Samples) {
    let others = &names[1..];
    let columns = names.iter().map(|name| format!(" {name} p50 | p99 |"));
    let ratios = others.iter().map(|name| format!(" Gantry / {name}, p50 | p99 |"));
    println!("| |{}", columns.chain(ratios).collect::<String>());
    println!("|---|{}", "---|".repeat(2 * (names.len() + others.len())));
    for row in Row::ALL {
        let of = |number| samples.get(&(row, number)).map_or(&[][..], Vec::as_slice);
        let columns = (0..names.len()).map(|number| {
            let cell = |share| at(of(number), share).map_or_else(String::new, Sample::text);
            format!(" {} | {} |", cell(0.5), cell(0.99))
        });
        let ratios = (1..names.len()).map(|number| {
            let ratio = |share| match (at(of(0), share), at(of(number), share)) {
                (Some(ours), Some(theirs)) => format!("{:.2}", ours.value() / theirs.value()),
                _ => String::new(),
            };
            format!(" {} | {} |", ratio(0.5), ratio(0.99))
        });
        println!("| {} |{}", row.name(), columns.chain(ratios).collect::<String>());
    }
}

/// The value that this share of the samples does not exceed. Of a few samples the last is no percentile.
fn at(samples: &[Sample], share: f64) -> Option<Sample> {
    if share > 0.5 && samples.len() < 100 {
        return None;
    }
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
