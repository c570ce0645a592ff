//! Resident memory of a plugin, at rest and after many calls, whatever it offers.

use std::time::Duration;

use anyhow::Result;
use gantry_e2e::peer::Plugin;

use crate::caller::Call;
use crate::measure::{Running, running};
use crate::row::{Mode, Moment, Row, Sample};

const REST: Duration = Duration::from_secs(30);
const MANY_CALLS: usize = 13_000;
/// As many as a container asks for.
const MOST: usize = 8;

/// Memory in every mode.
pub(crate) async fn all(plugin: &Plugin, take: &mut impl FnMut(Row, Vec<Sample>)) -> Result<()> {
    let mut runs = Vec::new();
    for mode in Mode::ALL {
        runs.push((mode, running(plugin, mode).await?));
    }
    tokio::time::sleep(REST).await;
    for (mode, run) in &runs {
        let row = |moment| Row::Memory(*mode, moment);
        take(row(Moment::AtRest), vec![Sample::Bytes(run.process.resident()?)]);
        calls(run).await?;
        take(row(Moment::AfterCalls), vec![Sample::Bytes(run.process.resident()?)]);
    }
    Ok(())
}

async fn calls(run: &Running) -> Result<()> {
    let sizes = 1..=run.ids.len().min(MOST);
    let calls = sizes
        .flat_map(|size| [Call::allocate(&run.ids[..size]), Call::prefer(&run.ids, size)])
        .collect::<Result<Vec<_>>>()?;
    for call in calls.iter().cycle().take(MANY_CALLS) {
        run.caller.call(call).await?;
    }
    Ok(())
}
