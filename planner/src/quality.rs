//! How good devices are for a request: what the pod prefers of them, and the links between them. Nodes for single pods and
//! places for the members of a gang are compared by it.

use std::cmp::Reverse;

use gantry_topology::LinkClass;

use crate::decide::megabytes;
use crate::layout::Layout;
use crate::placement::{PlacementRequest, SetTerms};
use crate::site::Site;
use crate::snapshot::Class;

/// How far devices have what a request prefers. The larger one is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Preferences {
    /// The place of the GPUs' model in the pod's list; the worst of several.
    pub model: Reverse<usize>,
    /// How many of the preferred link and the preferred bandwidth they have.
    pub met: u8,
    /// What the node costs if the pod asks for economy, otherwise 0.
    pub cost: Reverse<u64>,
}

/// How good devices are. The larger one is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Quality {
    pub preferences: Preferences,
    /// Bandwidth of the worst-off container with two GPUs or more, MB/s; 0 where nothing is exchanged.
    pub megabytes_per_second: u64,
    /// What carries the collectives of that pod; the best where nothing is exchanged. Of two sets of equal bandwidth the
    /// closer one is better: collective libraries do not use peer-to-peer across a PCIe host bridge unless configured to.
    pub link: LinkClass,
}

/// A part of the quality by which devices are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QualityPart {
    Model,
    /// The preferred link and the preferred bandwidth.
    Met,
    Cost,
    Bandwidth,
    Link,
}

impl Quality {
    /// The part that decides between it and another; `None` if they are equal.
    pub fn decided_by(&self, other: &Self) -> Option<QualityPart> {
        // Every field in the order in which they are compared.
        let Self { preferences: Preferences { model, met, cost }, megabytes_per_second, link } = *self;
        let differs = [
            (model != other.preferences.model, QualityPart::Model),
            (met != other.preferences.met, QualityPart::Met),
            (cost != other.preferences.cost, QualityPart::Cost),
            (megabytes_per_second != other.megabytes_per_second, QualityPart::Bandwidth),
            (link != other.link, QualityPart::Link),
        ];
        differs.into_iter().find(|(differs, _)| *differs).map(|(_, part)| part)
    }
}

/// The quality of a pod's devices, gathered resource by resource.
#[derive(Debug)]
pub struct QualitySum<'r> {
    request: &'r PlacementRequest,
    model: usize,
    gbs: Option<f64>,
    link: Option<LinkClass>,
}

impl<'r> QualitySum<'r> {
    /// That of no devices yet.
    pub fn new(request: &'r PlacementRequest) -> Self {
        Self { request, model: 0, gbs: None, link: None }
    }

    /// Adds the devices of one resource.
    pub fn add(&mut self, site: Site<'_>, layout: &Layout) {
        if let Some(gbs) = layout.gbs {
            self.gbs = Some(self.gbs.map_or(gbs, |least| least.min(gbs)));
        }
        if let Some(class) = layout.class {
            self.link = Some(self.link.map_or(class, |least| least.min(class)));
        }
        let models = &self.request.required.models;
        let place = |device| models.iter().take_while(|model| !site.is_of_model(device, model)).count();
        if !models.is_empty() {
            self.model = layout.devices.iter().map(place).fold(self.model, usize::max);
        }
    }

    /// Whether devices exchange anything.
    pub fn exchanges(&self) -> bool {
        self.gbs.is_some()
    }

    /// The quality of all of them on a node of a class.
    pub fn quality(&self, class: &Class) -> Quality {
        let (link, gbs) = (self.link.unwrap_or(LinkClass::NvLink), self.gbs.unwrap_or(f64::INFINITY));
        let preferred = &self.request.preferred;
        let of_link = SetTerms { link: preferred.link, ..SetTerms::default() };
        let of_bandwidth = SetTerms { gbs: preferred.gbs, ..SetTerms::default() };
        let preferences = Preferences {
            model: Reverse(self.model),
            met: [of_link, of_bandwidth].iter().map(|terms| u8::from(terms.are_met(link, gbs))).sum(),
            cost: Reverse(if self.request.economy { class.cost } else { 0 }),
        };
        Quality { preferences, megabytes_per_second: self.gbs.map_or(0, megabytes), link }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    prop_compose! {
        fn qualities()(
            model in 0..2usize,
            (met, cost, megabytes_per_second) in (0..2u8, 0..2u64, 0..2u64),
            link in 0..2usize,
        ) -> Quality {
            let preferences = Preferences { model: Reverse(model), met, cost: Reverse(cost) };
            Quality { preferences, megabytes_per_second, link: LinkClass::ALL[link] }
        }
    }

    proptest! {
        /// The named part is the first that differs in the order of comparison.
        #[test]
        fn named_part_decides_the_comparison(one in qualities(), other in qualities()) {
            let (a, b) = (one.preferences, other.preferences);
            let of_part = match one.decided_by(&other) {
                None => std::cmp::Ordering::Equal,
                Some(QualityPart::Model) => a.model.cmp(&b.model),
                Some(QualityPart::Met) => a.met.cmp(&b.met),
                Some(QualityPart::Cost) => a.cost.cmp(&b.cost),
                Some(QualityPart::Bandwidth) => one.megabytes_per_second.cmp(&other.megabytes_per_second),
                Some(QualityPart::Link) => one.link.cmp(&other.link),
            };
            prop_assert_eq!(of_part, one.cmp(&other));
        }
    }
}
