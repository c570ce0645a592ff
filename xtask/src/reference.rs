//! Pages of the reference that follow from tables of the code: Xids, and the reasons of Events and conditions.

use std::fmt::Write as _;
use std::process::Command;

use anyhow::Result;
use gantry_api::Reason;
use gantry_plugin::health::{Class, Table, Xid};

use crate::run::{cargo, output, run, target};

/// docs/reference/cli.md, by the program.
pub(crate) fn command_line() -> Result<String> {
    run(&mut cargo(&["build", "--locked", "--package", "gantry"]))?;
    // Help shows the values of variables.
    output(Command::new(target()?.join("debug/gantry")).env_clear().args(["man", "--markdown"]))
}

/// docs/xids.md.
pub(crate) fn xids() -> String {
    let table = Table::built_in();
    let mut page = "\
# Xids

Made by `cargo xtask generate` from `plugin/data/xid.csv`. Do not edit.

An Xid is an error that the NVIDIA driver reports of a GPU. The class decides what Gantry does ([health.md](health.md));
the response is the operator's, by the immediate action of NVIDIA's catalog. `gantry_plugin_xids_total` counts every Xid,
also those without effect. Xids that the catalog lists as unused, and those that are unknown here, count as `resettable`.

| class | what Gantry does |
|---|---|
| `application` | counts it; the GPU stays healthy |
| `link` | the links that went down decide; with a reset as the response the GPU is unhealthy until then |
| `mig-instance` | the MIG devices of the instance that the event names are unhealthy; without one, the GPU |
| `resettable` | the GPU is unhealthy until a reset is proved |
| `fatal` | the GPU is unhealthy until a reset or a reboot is proved |

| Xid | meaning | class | response |
|---|---|---|---|
"
    .to_owned();
    let known = |xid: &&Xid| !xid.meaning.starts_with("unexpected");
    for xid in table.all().iter().filter(known) {
        let class = match xid.class {
            Class::Link { reset: true } => "link, needs a reset".to_owned(),
            class => class.to_string(),
        };
        // Writing into a String cannot fail.
        let _ = writeln!(page, "| {} | {} | {class} | {} |", xid.code, cell(xid.meaning), xid.response);
    }
    page
}

/// docs/reasons.md.
pub(crate) fn reasons() -> String {
    let mut page = "\
# Reasons

Made by `cargo xtask generate` from `api/src/reason.rs`. Do not edit.

Events and conditions of Gantry, and the status of a `Gang`, have one of these reasons. A reason is stable: scripts and
alerts may compare it. The message beside it is for people and changes. [gangs-operations.md](gangs-operations.md) and
[health.md](health.md) explain what to do, [explain.md](explain.md) where to look.

| reason | meaning |
|---|---|
"
    .to_owned();
    for reason in Reason::ALL {
        let _ = writeln!(page, "| `{reason}` | {} |", cell(reason.text()));
    }
    page
}

/// Text of a table's cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_xid_has_a_row_with_a_response() {
        let page = xids();
        for (xid, class, response) in [
            (79, "fatal", "reboot"),
            (13, "application", "none"),
            (48, "mig-instance", "reset"),
            (74, "link", "links"),
        ] {
            let row = page.lines().find(|line| line.starts_with(&format!("| {xid} |"))).expect("a row");
            assert!(row.contains(&format!("| {class} |")) && row.contains(response), "{row}");
        }
        assert!(Table::built_in().all().iter().all(|xid| !xid.response.is_empty()));
    }
}
