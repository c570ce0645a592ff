//! The specifications of memory channels and GPUDirect, from the nodes that exist. A class without nodes has no specification.

use super::gpus::{READ_ONLY, mount, nodes, void};
use super::host::Host;
use super::kind::{ALL, Class, Kind};
use super::spec::{Device, Edits, Mount, Spec};
use crate::allocate::IMEX_CHANNEL;
use gantry_config::Config;

pub(super) fn specs(kind: &Kind, config: &Config, host: &Host) -> Vec<(Class, Spec)> {
    let starting = |prefixes: &[&'static str]| -> Vec<String> {
        prefixes
            .iter()
            .flat_map(|prefix| host.nodes.starting(prefix))
            .map(str::to_owned)
            .collect()
    };
    let wanted = [
        (config.imex.channel, Class::ImexChannel, "0", &[IMEX_CHANNEL][..]),
        (config.gdrcopy, Class::Gdrcopy, ALL, &["gdrdrv"]),
        (config.gds, Class::Gds, ALL, &["nvidia-fs"]),
        (
            config.mofed,
            Class::Mofed,
            ALL,
            &["infiniband/rdma_cm", "infiniband/uverbs"],
        ),
    ];
    wanted
        .into_iter()
        .filter(|(on, ..)| *on)
        .filter_map(|(_, class, name, prefixes)| {
            let found = starting(prefixes)
                .into_iter()
                // channel0 is also a prefix of channel01.
                .filter(|node| class != Class::ImexChannel || node == IMEX_CHANNEL);
            let device = Device {
                name: name.to_owned(),
                container_edits: nodes(config, host, found),
            };
            let common = Edits {
                env: vec![void()],
                mounts: if class == Class::Gds {
                    storage(config, host)
                } else {
                    Vec::new()
                },
                ..Edits::default()
            };
            Some((class, Spec::new(kind.of(class), common, [device])?))
        })
        .collect()
}

fn storage(config: &Config, host: &Host) -> Vec<Mount> {
    let files = host.driver.storage.iter();
    files.map(|file| mount(config, file, READ_ONLY)).collect()
}
