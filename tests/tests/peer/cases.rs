//! The matrix: machines and settings. For each, both plugins' answers are written down and compared.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use gantry_e2e::peer::{
    Difference, Facts, Mig, Node, Plugin, Setting, Sharing, Strategy, differences, documented, observe,
    unexplained,
};

use crate::deliberate::ROWS;

/// A machine, the MIG layout of its GPUs, and the plugin's settings.
struct Case {
    machine: &'static str,
    cuts: Vec<(u8, Vec<&'static str>)>,
    setting: Setting,
}

/// An NVSwitch machine, one of NVLink pairs, and one without NVLink.
const MACHINES: [&str; 3] = ["dgx-a100", "a40-8x-bridged", "l4-4x-pcie"];

fn cases() -> Vec<Case> {
    use Strategy::{CdiAnnotations, CdiCri, Envvar, VolumeMounts};
    let case = |machine, setting| Case { machine, cuts: Vec::new(), setting };
    let mut cases: Vec<Case> =
        MACHINES.into_iter().map(|machine| case(machine, Setting::default())).collect();
    let ways: [&[Strategy]; 8] = [
        &[Envvar],
        &[VolumeMounts],
        &[CdiCri],
        &[CdiAnnotations],
        &[Envvar, VolumeMounts],
        &[Envvar, CdiCri],
        &[VolumeMounts, CdiAnnotations],
        &[CdiAnnotations, CdiCri],
    ];
    for strategies in ways {
        for pass_device_specs in [false, true] {
            for index_ids in [false, true] {
                let setting = Setting {
                    strategies: strategies.to_vec(),
                    pass_device_specs,
                    index_ids,
                    // Either way of telling it must do.
                    in_file: pass_device_specs != index_ids,
                    ..Setting::default()
                };
                cases.push(case("l4-4x-pcie", setting));
            }
        }
    }
    for (replicas, rename, one_only, pass_device_specs) in [
        (2, false, false, false),
        (4, true, false, false),
        (4, false, true, false),
        (3, true, true, true),
        (4, false, false, true),
    ] {
        let sharing = Sharing { replicas, rename, one_only };
        let setting = Setting { sharing: Some(sharing), pass_device_specs, ..Setting::default() };
        cases.push(case("l4-4x-pcie", setting));
    }
    cases.extend(cut());
    cases
}

/// GPUs with MIG: not advertised, under the name of whole GPUs, and each profile under its own name.
fn cut() -> Vec<Case> {
    let alike: Vec<(u8, Vec<&str>)> = (0..8).map(|gpu| (gpu, vec!["1g.5gb"; 7])).collect();
    let unlike = vec![
        (0, vec!["3g.20gb", "3g.20gb"]),
        (1, vec!["1g.5gb+me", "2g.10gb", "1g.5gb"]),
        (5, vec!["1g.5gb", "1g.5gb"]),
    ];
    let told = |mig, strategy, pass_device_specs, index_ids| Setting {
        mig,
        strategies: vec![strategy],
        pass_device_specs,
        index_ids,
        ..Setting::default()
    };
    let case = |cuts: &Vec<(u8, Vec<&'static str>)>, setting| Case {
        machine: "dgx-a100",
        cuts: cuts.clone(),
        setting,
    };
    vec![
        case(&unlike, told(None, Strategy::Envvar, false, false)),
        case(&Vec::new(), told(Some(Mig::Single), Strategy::Envvar, false, false)),
        case(&alike, told(Some(Mig::Single), Strategy::Envvar, true, false)),
        case(&alike, told(Some(Mig::Single), Strategy::VolumeMounts, false, true)),
        case(&unlike, told(Some(Mig::Mixed), Strategy::Envvar, true, false)),
        case(&unlike, told(Some(Mig::Mixed), Strategy::VolumeMounts, true, true)),
    ]
}

impl Case {
    fn node(&self) -> Result<Node> {
        let node = Node::of(self.machine)?;
        for (gpu, pieces) in &self.cuts {
            node.controller().recut(*gpu, pieces)?;
        }
        Ok(node)
    }

    fn text(&self) -> String {
        format!("{}, {:?}, {:?}", self.machine, self.cuts, self.setting)
    }
}

pub(crate) async fn same_as_documented() -> Result<()> {
    let gantry = Plugin::gantry()?;
    compare(async |node, setting| {
        let theirs = documented(node, setting)?;
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

/// `documented` agrees with NVIDIA's program.
pub(crate) async fn documented_is_true(nvidia: &Plugin) -> Result<()> {
    for case in cases() {
        let node = case.node()?;
        let program = observed(&node, nvidia, &case.setting).await?;
        let found = differences(&documented(&node, &case.setting)?, &program);
        ensure!(found.is_empty(), "{}:\n{}", case.text(), text(&found));
    }
    Ok(())
}

/// Compares every case, and wants every row of the table used by one.
async fn compare(both: impl AsyncFn(&Node, &Setting) -> Result<(Facts, Facts)>) -> Result<()> {
    let mut used = BTreeSet::new();
    let mut wrong = String::new();
    for case in cases() {
        let node = case.node()?;
        let compared = both(&node, &case.setting).await;
        let (ours, theirs) = match compared {
            Ok(both) => both,
            Err(error) => {
                wrong += &format!("{}: {error:#}\n", case.text());
                continue;
            }
        };
        let (left, rows) = unexplained(&case.text(), differences(&ours, &theirs), ROWS);
        used.extend(rows);
        if !left.is_empty() {
            wrong += &format!("{}:\n{}", case.text(), text(&left));
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
    let resources = documented(node, setting)?;
    let resources = resources.keys().filter(|item| item.ends_with(" socket"));
    observe(node, plugin, setting, resources.count()).await
}

fn text(differences: &[Difference]) -> String {
    let line = |one: &Difference| {
        let side = |value: &Option<String>| value.clone().unwrap_or_else(|| "(none)".to_owned());
        format!("  {}\n    ours    {}\n    NVIDIA's {}\n", one.item, side(&one.ours), side(&one.theirs))
    };
    differences.iter().map(line).collect()
}
