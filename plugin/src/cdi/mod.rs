//! CDI: what a runtime adds to a container for each device, one specification per class. The specifications follow the inventory, the
//! configuration and the host's files; Allocate names only what a specification has.

mod content;
mod driver;
mod host;
mod kind;
mod lacks;
mod ldcache;
mod names;
mod spec;
mod writer;

pub use driver::{Driver, File, InstalledDriver, Library};
pub use host::Host;
pub(crate) use host::nodes;
pub use kind::{ALL, Class, Kind, KindError, VENDOR, device_name, runtime_id};
pub use names::{Entries, Names};
pub use spec::{Device, Edits, Hook, Mount, Node, Spec};
pub(crate) use writer::replace;
pub use writer::{Channels, Writer};

use std::collections::BTreeMap;

use crate::inventory::Inventory;
use gantry_config::Config;

/// The specifications for containers of these devices, and of the other devices in `names`. A class without content has none; without a
/// strategy that needs CDI there are none.
pub fn specs(
    kind: &Kind,
    config: &Config,
    inventory: &Inventory,
    host: &Host,
    names: &Names,
) -> BTreeMap<Class, Spec> {
    if !uses_cdi(config) {
        return BTreeMap::new();
    }
    let gpus = content::gpus(kind, config, inventory, host, names);
    let others = content::others(kind, config, host);
    gpus.map(|spec| (Class::Gpu, spec)).into_iter().chain(others).collect()
}

fn uses_cdi(config: &Config) -> bool {
    config.device_list_strategy.iter().any(|strategy| strategy.is_cdi())
}
