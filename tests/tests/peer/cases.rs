//! The matrix: machines and settings. For each, both plugins' answers are written down and compared.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use gantry_e2e::peer::{
    Difference, Facts, Node, Plugin, Setting, Sharing, Strategy, differences, documented, observe,
    unexplained,
};

use crate::deliberate::ROWS;

/// A machine and what the plugin on it is told.
type Case = (&'static str, Setting);

/// An NVSwitch machine, one of NVLink pairs, and one without NVLink.
const MACHINES: [&str; 3] = ["dgx-a100", "a40-8x-bridged", "l4-4x-pcie"];

fn cases() -> Vec<Case> {
    use Strategy::{CdiAnnotations, CdiCri, Envvar, VolumeMounts};
    let told = |strategies: &[Strategy]| Setting {
        strategies: strategies.to_vec(),
        ..Setting::default()
    };
    let shared = |replicas, rename, one_only| Setting {
        sharing: Some(Sharing {
            replicas,
            rename,
            one_only,
        }),
        ..Setting::default()
    };
    let settings = [
        told(&[Envvar]),
        told(&[CdiCri]),
        told(&[CdiAnnotations]),
        told(&[Envvar, CdiCri]),
    ];
    let _ = (VolumeMounts, shared);
    let mut cases: Vec<Case> = MACHINES
        .into_iter()
        .map(|machine| (machine, Setting::default()))
        .collect();
    cases.extend(settings.into_iter().map(|setting| ("l4-4x-pcie", setting)));
    cases
}

pub(crate) async fn same_as_documented() -> Result<()> {
    let gantry = Plugin::gantry()?;
    compare(async |node, setting| {
        let theirs = documented(node.hardware(), setting);
        Ok((observed(node, &gantry, setting).await?, theirs))
    })
    .await
}

pub(crate) async fn same_as_program(nvidia: &Plugin) -> Result<()> {
    let gantry = Plugin::gantry()?;
    compare(async |node, setting| {
        let theirs = observed(node, nvidia, setting).await?;
        Ok((observed(node, &gantry, setting).await?, theirs))
    })
    .await
}

/// What `documented` says is what NVIDIA's program does.
pub(crate) async fn documented_is_true(nvidia: &Plugin) -> Result<()> {
    for (machine, setting) in cases() {
        let node = Node::of(machine)?;
        let program = observed(&node, nvidia, &setting).await?;
        let found = differences(&documented(node.hardware(), &setting), &program);
        ensure!(found.is_empty(), "{machine}, {setting:?}:\n{}", text(&found));
    }
    Ok(())
}

/// Compares every case, and wants every row of the table used by one.
async fn compare(both: impl AsyncFn(&Node, &Setting) -> Result<(Facts, Facts)>) -> Result<()> {
    let mut used = BTreeSet::new();
    let mut wrong = String::new();
    for (machine, setting) in cases() {
        let node = Node::of(machine)?;
        let (ours, theirs) = both(&node, &setting)
            .await
            .with_context(|| format!("{machine}, {setting:?}"))?;
        let (left, rows) = unexplained(differences(&ours, &theirs), ROWS);
        used.extend(rows);
        if !left.is_empty() {
            wrong += &format!("{machine}, {setting:?}:\n{}", text(&left));
        }
    }
    for (number, row) in ROWS.iter().enumerate() {
        if !used.contains(&number) {
            wrong += &format!("no longer a difference: {} ({})\n", row.item, row.reason);
        }
    }
    ensure!(wrong.is_empty(), "{wrong}");
    Ok(())
}

async fn observed(node: &Node, plugin: &Plugin, setting: &Setting) -> Result<Facts> {
    for file in std::fs::read_dir(node.cdi())? {
        std::fs::remove_file(file?.path())?;
    }
    observe(node, plugin, setting, 1).await
}

fn text(differences: &[Difference]) -> String {
    let line = |one: &Difference| {
        let side = |value: &Option<String>| value.clone().unwrap_or_else(|| "(none)".to_owned());
        format!(
            "  {}\n    ours    {}\n    NVIDIA's {}\n",
            one.item,
            side(&one.ours),
            side(&one.theirs)
        )
    };
    differences.iter().map(line).collect()
}
