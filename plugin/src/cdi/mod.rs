//! CDI: what a runtime adds to a container for each device, one specification per class. Kept in step with the inventory, the
//! configuration and the host's files; Allocate names nothing that no specification has.

mod classes;
mod driver;
mod entries;
mod folders;
mod gpus;
mod hooks;
mod host;
mod kind;
mod ldcache;
mod names;
mod spec;
mod writer;

pub use driver::{Driver, File, Library};
pub use entries::Entries;
pub use host::Host;
pub(crate) use host::nodes;
pub use kind::{ALL, Class, Kind, KindError, VENDOR, device_name, runtime_id};
pub use names::Names;
pub use spec::{Device, Edits, Hook, Mount, Node, Spec};
pub use writer::{Channels, Writer};

use std::collections::BTreeMap;

use crate::inventory::Inventory;
use gantry_config::Config;

/// The specifications that containers of these devices need, and of those that `names` knows besides. A class that nothing is to be said
/// of has none; where no strategy needs CDI, none is there.
pub fn specs(
    kind: &Kind,
    config: &Config,
    inventory: &Inventory,
    host: &Host,
    names: &Names,
) -> BTreeMap<Class, Spec> {
    if !config
        .device_list_strategy
        .iter()
        .any(|strategy| strategy.is_cdi())
    {
        return BTreeMap::new();
    }
    let gpus = gpus::spec(kind, config, inventory, host, names);
    let others = classes::specs(kind, config, host);
    gpus.map(|spec| (Class::Gpu, spec))
        .into_iter()
        .chain(others)
        .collect()
}
