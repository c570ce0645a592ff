//! Why a gang is where it is, or why it waits: what was tried at each level of the fabric, what is missing, who is ahead of it, and whose end
//! would let it fit. For people; nothing is decided or changed here.

use gantry_api::PodUid;
use gantry_gang::protocol::Wanted;
use serde::Serialize;

use super::GangView;
use crate::gang::plan::{self, Explanation};
use crate::gang::preempt;
use crate::index::Index;

/// What is to be said of a gang.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GangReport {
    /// The gang.
    #[serde(flatten)]
    pub gang: GangView,
    /// Gangs that are planned before it, the first first: `namespace/name`.
    pub ahead: Vec<String>,
    /// What was tried for the members that have no place; absent if all have one.
    pub tried: Option<Explanation>,
    /// Pods that would have to end for it to fit, whole gangs at a time and with as little loss as can be; empty if it fits, or if no end
    /// of pods helps.
    pub would_have_to_end: Vec<String>,
}

impl Index {
    /// What is to be said of the newest gang of a name, or of the name of a Gang object.
    pub fn inspect_gang(&self, namespace: &str, name: &str) -> Option<GangReport> {
        let gang = self.gang_view(namespace, name)?;
        let key = self
            .gangs
            .core
            .views()
            .map(|view| view.key())
            .find(|key| *key.namespace == *gang.namespace && key.object_name() == gang.object)?;
        let queue = self.gangs.core.queue(self.now);
        let ahead = queue
            .iter()
            .take_while(|other| *other != key)
            .map(ToString::to_string);
        let ahead = match gang.position {
            Some(_) => ahead.collect(),
            None => Vec::new(),
        };
        let wanted = self.gangs.core.wanted(key);
        let wanted = wanted.filter(|wanted| !wanted.members.is_empty());
        let tried = wanted
            .as_ref()
            .map(|wanted| self.on_terrain(Some(wanted), |terrain| plan::explain(terrain, wanted)));
        let would_have_to_end = match (&wanted, &tried) {
            (Some(wanted), Some(tried)) if !tried.hopeless => self.in_the_way(wanted),
            _ => Vec::new(),
        };
        Some(GangReport {
            gang,
            ahead,
            tried,
            would_have_to_end,
        })
    }

    /// Whether an object that says how large a gang is has not been read yet.
    pub fn owners_unread(&self) -> bool {
        self.gangs.core.owners_wanted().iter().any(|wanted| wanted.unread)
    }

    /// The gangs that wait for a place, in the order in which they are planned.
    pub fn waiting_gangs(&self) -> Vec<GangView> {
        let queue = self.gangs.core.queue(self.now);
        let views = queue.iter().filter_map(|key| self.gangs.core.view(key));
        views.map(|view| self.show(view, &queue)).collect()
    }

    /// What gangs of a namespace are called.
    pub fn gang_names(&self, namespace: &str) -> Vec<String> {
        let keys = self.gangs.core.views().map(|view| view.key());
        let mut names: Vec<String> = keys
            .filter(|key| *key.namespace == *namespace)
            .map(|key| key.name.to_string())
            .collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// Whose end would let a gang fit, whatever their priority and budgets.
    fn in_the_way(&self, wanted: &Wanted) -> Vec<String> {
        let wanted = Wanted {
            priority: i32::MAX,
            ..wanted.clone()
        };
        let placement = self.among_occupants(&wanted, |mut occupants| {
            for occupant in &mut occupants {
                occupant.budgets.clear();
                occupant.priority = occupant.priority.min(i32::MAX - 1);
            }
            self.on_terrain(Some(&wanted), |terrain| {
                preempt::preempt(terrain, &wanted, &occupants)
            })
        });
        let victims = placement.into_iter().flat_map(|placement| placement.victims);
        let mut names: Vec<String> = victims.filter_map(|uid| self.name_of(&uid)).collect();
        names.sort_unstable();
        names
    }

    fn name_of(&self, uid: &PodUid) -> Option<String> {
        let (namespace, name) = self.pod_address(uid)?;
        Some(format!("{namespace}/{name}"))
    }
}
