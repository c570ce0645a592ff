//! The /metrics family of devices held by containers per GPU, from PodResources. At most as many series as devices;
//! series of a pod end with it.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use crate::handover::Listing;
use crate::inventory::Inventory;

/// The present state.
#[derive(Debug, Default)]
pub(super) struct Holders(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    listing: Listing,
    /// UUID of the physical GPU of each GPU and MIG device, by its own UUID.
    gpus: BTreeMap<String, String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct Holds {
    resource: String,
    gpu: String,
    namespace: String,
    pod: String,
    container: String,
}

impl Holders {
    /// Sets the list of PodResources; empty if it cannot be read.
    pub(super) fn listed(&self, listing: Listing) {
        self.change(|known| known.listing = listing);
    }

    /// Sets the node's devices.
    pub(super) fn inventory(&self, inventory: &Inventory) {
        let gpu = |index| {
            let gpu = inventory.machine.gpus().iter().find(|gpu| gpu.index == index)?;
            Some(gpu.uuid.as_ref()?.to_string())
        };
        let places = inventory.whereabouts().into_iter();
        let gpus = places.filter_map(|(uuid, place)| Some((uuid.to_owned(), gpu(place)?))).collect();
        self.change(|known| known.gpus = gpus);
    }

    /// Devices, replicas and MIG devices that containers hold, by GPU. Devices of other plugins are left out.
    pub(super) fn family(&self) -> Family<Holds, Gauge> {
        let family: Family<Holds, Gauge> = Family::default();
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (holding, devices) in &known.listing.0 {
            // By unit: pods from before a configuration change hold IDs that are not offered any more.
            let gpus = devices.iter().filter_map(|device| known.gpus.get(device.unit()));
            for gpu in gpus {
                let labels = Holds {
                    resource: holding.resource.to_string(),
                    gpu: gpu.clone(),
                    namespace: holding.namespace.clone(),
                    pod: holding.pod.clone(),
                    container: holding.container.clone(),
                };
                family.get_or_create(&labels).inc();
            }
        }
        family
    }

    fn change(&self, change: impl FnOnce(&mut Known)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use gantry_topology::{Gpu, Machine, MachineParts, PathClass, PathMatrix};

    use crate::handover::{Holding, Listing};
    use crate::inventory::{Hardware, Inventory};
    use crate::observe::Observed;
    use crate::offer::offer;
    use gantry_config::{Config, Replicated, Selector, SharedOf, TimeSlicing};

    #[test]
    fn replicas_are_counted_by_gpu_and_end_with_container() {
        let gpu = |index| Gpu {
            index,
            uuid: format!("GPU-{index}").parse().ok(),
            minor: Some(u32::from(index)),
            ..Gpu::default()
        };
        let parts = MachineParts {
            gpus: vec![gpu(0), gpu(1)],
            paths: PathMatrix::from_fn(2, |_, _| PathClass::Sys),
            ..MachineParts::default()
        };
        let hardware = Hardware::of(Arc::new(Machine::new(parts).unwrap()));
        let observed = Observed::default();
        observed.inventory(&shared(&hardware));
        let holding = |resource: &str| Holding {
            namespace: "ml".into(),
            pod: "notebook-0".into(),
            container: "main".into(),
            resource: resource.into(),
        };
        let ids = |ids: &[&str]| ids.iter().map(|id| (*id).into()).collect();
        observed.holders(Listing(
            [
                (holding("nvidia.com/gpu.shared"), ids(&["GPU-0::0", "GPU-0::1", "GPU-1::3"])),
                (holding("example.com/nic"), ids(&["eth1"])),
            ]
            .into(),
        ));
        let lines = |observed: &Observed| {
            let text = observed.metrics().text().unwrap();
            let lines = text.lines();
            let mut lines: Vec<String> = lines
                .filter_map(|line| line.strip_prefix("gantry_plugin_allocated_devices{"))
                .map(str::to_owned)
                .collect();
            lines.sort();
            lines
        };
        let labels = |gpu| {
            format!(
                r#"resource="nvidia.com/gpu.shared",gpu="{gpu}",namespace="ml",pod="notebook-0",container="main""#
            )
        };
        assert_eq!(
            lines(&observed),
            [format!("{}}} 2", labels("GPU-0")), format!("{}}} 1", labels("GPU-1"))]
        );
        observed.inventory(&offer(&hardware, &Config::default()));
        assert_eq!(lines(&observed).len(), 2, "a container runs on when sharing ends");
        let denied = Config { deny: vec![Selector::Index(0)], ..Config::default() };
        observed.inventory(&offer(&hardware, &denied));
        assert_eq!(lines(&observed).len(), 2, "and when its GPU is offered no more");
        observed.holders(Listing::default());
        assert!(lines(&observed).is_empty(), "the pod is gone");
    }

    fn shared(hardware: &Hardware) -> Inventory {
        let replicated = Replicated {
            name: "nvidia.com/gpu".into(),
            rename: Some("nvidia.com/gpu.shared".into()),
            devices: SharedOf::All,
            replicas: 4,
        };
        let config = Config {
            time_slicing: Some(TimeSlicing {
                rename_by_default: false,
                fail_requests_greater_than_one: false,
                resources: vec![replicated],
            }),
            ..Config::default()
        };
        offer(hardware, &config)
    }
}
