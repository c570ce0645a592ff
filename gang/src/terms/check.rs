//! What numbers and names say against each other.

use std::collections::BTreeSet;
use std::sync::Arc;

use gantry_api::GangSpec;

use super::Fault;
use super::declared::Declared;
use crate::counted::{are, members};
use crate::fabric::{Levels, NODE, Scope};
use crate::integrations::value::{MOST_MEMBERS, fault, level, nearest, shown, unknown as unknown_name};
use crate::membership::{GangOptions, OwnerFacts};

/// Most names that are listed of those that there are.
const LISTED: usize = 64;

/// What the schema of the Gang object forbids, for a cluster with an older schema or none.
pub(super) fn object(object: &GangSpec, faults: &mut BTreeSet<Fault>) {
    let counts = [
        ("minMember", object.min_member),
        ("maxMember", object.max_member),
        ("sliceSize", object.slice_size),
        ("arrivalSeconds", object.arrival_seconds),
    ];
    for (field, count) in counts {
        let most = if field == "arrivalSeconds" { 3600 } else { MOST_MEMBERS };
        if let Some(count) = count.filter(|count| !(1..=most).contains(count)) {
            faults.insert(fault(
                format!("spec.{field} of the Gang"),
                format!("{count} is not from 1 to {most}"),
            ));
        }
    }
}

/// Sub-groups that pods name and their owner does not have: such a pod counts for none of the minimums that there are.
pub(super) fn sub_groups(said: &Declared, facts: &OwnerFacts, faults: &mut BTreeSet<Fault>) {
    let Some(there) = &facts.sub_groups else {
        return;
    };
    let known: Vec<&str> = there.names.iter().take(LISTED).map(|name| &**name).collect();
    for role in said.roles.beyond(&there.names) {
        // What KAI calls the whole where there are none.
        let whole = role.is_empty() || known.is_empty() && **role == *"default";
        if whole {
            continue;
        }
        let what = format!("sub-group {role}, which its pods name");
        let words = match known.is_empty() {
            true => format!("no {what}; there are none"),
            false => unknown_name(&what, role, &known),
        };
        faults.insert(fault(Arc::clone(&there.said), words));
    }
}

/// What is known of the members that ask for no devices. They lie nowhere: slices are of the others.
#[derive(Debug, Clone, Copy)]
pub(super) struct Light {
    /// So many of them are known.
    pub(super) count: u32,
    /// Members of a role without any pod yet are needed, and may be such.
    pub(super) of_min: bool,
    /// The same of all that there will be.
    pub(super) of_total: bool,
}

impl Light {
    /// Whether slices of that size may make up those that are needed.
    pub(super) fn slices_min(&self, slice: u32, min: u32) -> bool {
        self.of_min && slice > 0 || divides(slice, min.saturating_sub(self.count))
    }

    /// Whether they may make up all that there will be.
    pub(super) fn slices_total(&self, slice: u32, total: u32) -> bool {
        self.of_total && slice > 0 || divides(slice, total.saturating_sub(self.count))
    }

    /// So many members, without those of them that ask for no devices.
    fn heavy(&self, count: u32) -> String {
        match self.count {
            0 => format!("{count}"),
            light => format!("{} with devices of the {count}", count.saturating_sub(light)),
        }
    }
}

/// What numbers say against each other.
pub(super) fn sizes(
    min: u32,
    total: Option<u32>,
    light: &Light,
    options: &GangOptions,
    decided_by: &str,
    faults: &mut BTreeSet<Fault>,
) {
    let mut wrong = |words: String| {
        faults.insert(fault("size", words));
    };
    if min == 0 {
        wrong(format!("{decided_by} is 0: at least 1 member is needed"));
    }
    if min > MOST_MEMBERS {
        wrong(format!("{min} members are needed ({decided_by}), and a gang has {MOST_MEMBERS} at most"));
    }
    if let Some(total) = total.filter(|total| min > *total) {
        wrong(format!("{} {} needed ({decided_by}), but there will be {total} only", members(min), are(min)));
    }
    if let Some(max) = options.max.filter(|max| min > *max) {
        wrong(format!("{} {} needed ({decided_by}), but there may be {max} at most", members(min), are(min)));
    }
    let Some(slice) = options.slice else {
        return;
    };
    match &options.level {
        None => wrong(format!(
            "slices of {slice} members are asked for, but no level in which each is to be; name one"
        )),
        Some(options) if *options.level == *NODE => wrong(format!(
            "slices of {slice} members are asked for, each on one node: slices are planned for in levels above the node only"
        )),
        Some(_) => {}
    }
    if !light.slices_min(slice, min) {
        wrong(format!(
            "slices of {slice} members do not make up the {} that are needed ({decided_by})",
            light.heavy(min)
        ));
    }
    if let Some(total) = total.filter(|total| !light.slices_total(slice, *total)) {
        wrong(format!(
            "slices of {slice} members do not make up the {} that there will be",
            light.heavy(total)
        ));
    }
}

fn divides(slice: u32, count: u32) -> bool {
    count.checked_rem(slice) == Some(0)
}

/// Our name for a level that is called by its name or its node label.
pub(super) fn known(name: &str, levels: &Levels) -> Option<Arc<str>> {
    // Owners may name anything at any length.
    let name = level(name).ok()?;
    match levels.find(&name).ok()? {
        Scope::Level(level) => levels.0.get(level).map(|level| Arc::clone(&level.name)),
        Scope::Node => Some(NODE.into()),
    }
}

pub(super) fn unknown(name: &str, levels: &Levels) -> String {
    if levels.0.is_empty() {
        return format!("{} is not among the levels given with --fabric; there is {NODE} alone", shown(name));
    }
    let names = levels.0.iter().map(|level| &*level.name);
    let names: Vec<&str> = names.chain([NODE]).collect();
    let meant = nearest(name, &names).map_or_else(String::new, |level| format!("; did you mean `{level}`?"));
    format!(
        "{} is not among the levels given with --fabric; there are {}{meant}",
        shown(name),
        names.join(", ")
    )
}
