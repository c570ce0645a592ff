//! What the values of a config file mean together: defaults, contradictions, what is not served. A pure function of the file.

use std::path::{Path, PathBuf};

use gantry_api::{ResourceName, names};

use super::file::{Discovery, File, Flags, Pattern, Shared};
use super::notes::{Note, entry_key, key, notes};
use super::read::MAX_PROBLEMS;
use super::repeats::{self, Repeat};
use super::sharing::spelled;
use super::tree::{Node, Step};
use super::value::{Resource, Strategies};
use super::{Config, Fault, Gfd, Imex, Problem, Replicated, ResourcePattern, SharedOf, TimeSlicing};

/// Longest name after the slash of an annotation's key.
const MAX_ANNOTATION: usize = 63;
/// Length of what is put behind the prefix of the annotations that carry CDI names.
const ANNOTATION: usize = "nvidia-device-plugin_00000000-0000-0000-0000-000000000000".len();

/// The configuration, notes for people, and what cannot be served. `tree` tells where things stand, `gpu_resource` what whole GPUs are
/// called besides.
pub(super) fn resolve(
    file: File,
    tree: &Node,
    gpu_resource: Option<&ResourceName>,
) -> (Config, Vec<Problem>, Vec<Problem>) {
    let mut resolver = Resolver {
        tree,
        warnings: Vec::new(),
        problems: Vec::new(),
    };
    let config = resolver.config(file);
    // One more than is told of, so that the reader learns that there are more.
    for Note { path, text } in notes(&config, gpu_resource).take(MAX_PROBLEMS + 1) {
        resolver.warn_at(&path, text);
    }
    (config, resolver.warnings, resolver.problems)
}

struct Resolver<'a> {
    tree: &'a Node,
    warnings: Vec<Problem>,
    problems: Vec<Problem>,
}

impl Resolver<'_> {
    fn config(&mut self, file: File) -> Config {
        let default = Config::default();
        let Flags { plugin, .. } = &file.flags;
        self.discovery(&file.flags);
        self.absolute(
            &["flags", "nvidiaDriverRoot"],
            file.flags.nvidia_driver_root.as_ref(),
        );
        self.absolute(&["flags", "nvidiaDevRoot"], file.flags.nvidia_dev_root.as_ref());
        self.absolute(
            &["flags", "plugin", "nvidiaCTKPath"],
            plugin.nvidia_ctk_path.as_ref(),
        );
        let cdi_annotation_prefix = self.annotation_prefix(plugin.cdi_annotation_prefix.as_ref());
        let driver_root = path(file.flags.nvidia_driver_root.as_ref(), &default.driver_root);
        let mig_strategy = file.flags.mig_strategy.unwrap_or_default();
        if file.sharing.mps.is_some() {
            self.refuse(
                &["sharing", "mps"],
                Fault::NotServed(
                    "MPS is not served by this plugin; share GPUs with sharing.timeSlicing, or cut them with MIG"
                        .to_owned(),
                ),
            );
        }
        let time_slicing = file.sharing.time_slicing.map(|shared| self.sharing(shared));
        let gpu_patterns = self.patterns("gpus", file.resources.gpus);
        let mig_patterns = self.patterns("mig", file.resources.mig);
        let mut feature_flags = plugin.cdi_feature_flags.clone().unwrap_or_default();
        feature_flags.sort_unstable();
        feature_flags.dedup();
        let mut disabled_hooks = plugin.cdi_disable_hooks.clone().unwrap_or_default();
        disabled_hooks.sort_unstable();
        disabled_hooks.dedup();
        Config {
            mig_strategy,
            fail_on_init_error: file
                .flags
                .fail_on_init_error
                .unwrap_or(default.fail_on_init_error),
            dev_root: path(file.flags.nvidia_dev_root.as_ref(), &driver_root),
            container_driver_root: path(
                plugin.container_driver_root.as_ref(),
                &default.container_driver_root,
            ),
            driver_root,
            device_list_strategy: plugin
                .device_list_strategy
                .clone()
                .map_or(default.device_list_strategy, |Strategies(list)| list),
            pass_device_specs: plugin.pass_device_specs.unwrap_or_default(),
            device_id_strategy: plugin.device_id_strategy.unwrap_or_default(),
            cdi_annotation_prefix: cdi_annotation_prefix.unwrap_or(default.cdi_annotation_prefix),
            cdi_hook_path: path(plugin.nvidia_ctk_path.as_ref(), &default.cdi_hook_path),
            cdi_feature_flags: feature_flags,
            cdi_disabled_hooks: disabled_hooks,
            gdrcopy: file.flags.gdrcopy_enabled.unwrap_or_default(),
            gds: file.flags.gds_enabled.unwrap_or_default(),
            mofed: file.flags.mofed_enabled.unwrap_or_default(),
            imex: Imex {
                channel: file.imex.channel_ids.unwrap_or_default().0,
                required: file.imex.required.unwrap_or_default(),
            },
            shared_devices: plugin.shared_devices_allocation_policy,
            gfd: self.gfd(&file.flags),
            gpu_patterns,
            mig_patterns,
            time_slicing,
            allow: file.devices.allow,
            deny: file.devices.deny,
        }
    }

    fn discovery(&mut self, flags: &Flags) {
        let what = match flags.device_discovery_strategy {
            None | Some(Discovery::Auto | Discovery::Nvml) => return,
            Some(Discovery::Tegra) => "integrated (Tegra) GPUs are",
            Some(Discovery::Vfio) => "GPUs bound to VFIO are",
        };
        self.refuse(
            &["flags", "deviceDiscoveryStrategy"],
            Fault::NotServed(format!(
                "{what} not served by this plugin; write auto or nvml, and run NVIDIA's plugin on such nodes"
            )),
        );
    }

    /// Refuses a path of the host that a runtime could not follow.
    fn absolute(&mut self, keys: &[&str], said: Option<&String>) {
        if let Some(path) = said.filter(|path| !path.is_empty() && !path.starts_with('/')) {
            let text = format!(
                "{path:?} is no path from the root of the host; runtimes take no other: begin it with /"
            );
            self.refuse(keys, Fault::Invalid(text));
        }
    }

    /// The prefix of annotations, if one is said. With a name behind it, it must be the key of an annotation.
    fn annotation_prefix(&mut self, said: Option<&String>) -> Option<String> {
        let prefix = said.filter(|prefix| !prefix.is_empty())?;
        let is_key = prefix.split_once('/').is_some_and(|(domain, name)| {
            let inside = |ch: char| ch.is_ascii_alphanumeric() || "-_.".contains(ch);
            names::is_subdomain(domain)
                && name.chars().all(inside)
                && name
                    .chars()
                    .next()
                    .is_none_or(|first| first.is_ascii_alphanumeric())
                && name.len() + ANNOTATION <= MAX_ANNOTATION
        });
        if !is_key {
            let text =
                format!("{prefix:?} begins no annotation; write a domain and a slash, such as cdi.k8s.io/");
            self.refuse(&["flags", "plugin", "cdiAnnotationPrefix"], Fault::Invalid(text));
        }
        Some(prefix.clone())
    }

    fn gfd(&mut self, flags: &Flags) -> Gfd {
        let default = Gfd::default();
        let said = &flags.gfd;
        let sleep_interval = match said.sleep_interval {
            Some(interval) if interval.is_short() => {
                self.warn(
                    &["flags", "gfd", "sleepInterval"],
                    format!(
                        "{} is too short (a bare number is nanoseconds); 1s is used",
                        String::from(interval)
                    ),
                );
                Some(Gfd::SHORTEST)
            }
            Some(interval) => interval.0,
            None => default.sleep_interval,
        };
        Gfd {
            oneshot: said.oneshot.unwrap_or_default(),
            no_timestamp: said.no_timestamp.unwrap_or_default(),
            sleep_interval,
            output_file: match said.output_file.as_deref() {
                None => default.output_file,
                Some("") => None,
                Some(file) => Some(file.into()),
            },
            machine_type_file: path(said.machine_type_file.as_ref(), &default.machine_type_file),
            use_node_feature_api: flags.use_node_feature_api.unwrap_or(default.use_node_feature_api),
        }
    }

    fn patterns(&mut self, section: &str, patterns: Vec<Pattern>) -> Vec<ResourcePattern> {
        let plain = |entry: &Pattern| match section {
            "mig" => spelled(&entry.pattern),
            _ => entry.pattern.clone(),
        };
        let plain: Vec<String> = patterns.iter().map(plain).collect();
        for (index, (own, hidden)) in plain.iter().zip(repeats::hidden(&plain)).enumerate() {
            let place = [key("resources"), key(section), Step::Index(index), key("pattern")];
            if own.is_empty() {
                self.refuse_at(
                    &place,
                    Fault::Invalid("an empty pattern matches nothing; * matches everything".to_owned()),
                );
            } else if let Some(before) = hidden {
                self.refuse_at(
                    &place,
                    Fault::Contradiction(format!(
                        "{:?} never counts: {} matches all of it first",
                        patterns.get(index).map_or("", |entry| &entry.pattern),
                        self.at(&[key("resources"), key(section), Step::Index(before)])
                    )),
                );
            }
        }
        patterns
            .into_iter()
            .map(
                |Pattern {
                     pattern,
                     name: Resource(name),
                 }| ResourcePattern { pattern, name },
            )
            .collect()
    }

    fn sharing(&mut self, mut shared: Shared) -> TimeSlicing {
        for (index, entry) in shared.resources.iter_mut().enumerate() {
            if matches!(&entry.devices, Some(SharedOf::Listed(list)) if list.is_empty()) {
                entry.devices = Some(SharedOf::All);
                self.warn_at(
                    &entry_key(index, "devices"),
                    "the list is empty, which means all devices, as with NVIDIA's plugin; leave the key out to say so"
                        .to_owned(),
                );
            }
        }
        if shared.resources.is_empty() {
            self.refuse(
                &["sharing", "timeSlicing", "resources"],
                Fault::Invalid(
                    "the list is empty; name at least one resource, or leave timeSlicing out".to_owned(),
                ),
            );
        }
        let rename_by_default = shared.rename_by_default.unwrap_or_default();
        for (index, entry) in shared.resources.iter().enumerate() {
            if rename_by_default && entry.rename.is_none() {
                let name = format!("{}.shared", entry.name.0);
                if let Err(text) = Resource::try_from(name) {
                    self.refuse_at(&entry_key(index, "name"), Fault::Invalid(text));
                }
            }
        }
        let repeats = repeats::shared_twice(&shared.resources);
        for (index, (entry, repeat)) in shared.resources.iter().zip(repeats).enumerate() {
            if let Some(repeat) = repeat {
                let text = self.repeated(&entry.name.0, &repeat);
                self.refuse_at(&entry_key(index, "devices"), Fault::Contradiction(text));
            }
        }
        TimeSlicing {
            rename_by_default,
            fail_requests_greater_than_one: shared.fail_requests_greater_than_one.unwrap_or_default(),
            resources: shared
                .resources
                .into_iter()
                .map(|entry| Replicated {
                    name: entry.name.0,
                    rename: entry.rename.map(|Resource(name)| name),
                    devices: entry.devices.unwrap_or(SharedOf::All),
                    replicas: entry.replicas.0,
                })
                .collect(),
        }
    }

    /// What a person is told of an entry that shares a resource's devices once more.
    fn repeated(&self, resource: &ResourceName, repeat: &Repeat<'_>) -> String {
        let place = |index| {
            let [sharing, slicing, resources, index, _] = entry_key(index, "name");
            self.at(&[sharing, slicing, resources, index])
        };
        match repeat {
            Repeat::InItself(device) => format!("device {device} is listed twice"),
            Repeat::Device(device, before) => {
                format!(
                    "device {device} of {resource} is shared by {} already",
                    place(*before)
                )
            }
            Repeat::Resource(before) => format!(
                "{resource} is shared by {} already; to share its devices differently, list them in both entries",
                place(*before)
            ),
        }
    }

    fn refuse(&mut self, keys: &[&str], fault: Fault) {
        self.refuse_at(&keys.iter().map(|name| key(name)).collect::<Vec<_>>(), fault);
    }

    fn refuse_at(&mut self, path: &[Step], fault: Fault) {
        let problem = self.place(path, fault);
        self.problems.push(problem);
    }

    fn warn(&mut self, keys: &[&str], text: String) {
        self.warn_at(&keys.iter().map(|name| key(name)).collect::<Vec<_>>(), text);
    }

    fn warn_at(&mut self, path: &[Step], text: String) {
        let problem = self.place(path, Fault::Invalid(text));
        self.warnings.push(problem);
    }

    /// What a person calls the place: entries before it that are wrong are not here, and count there.
    fn at(&self, path: &[Step]) -> &str {
        &self.tree.nearest(path).at
    }

    fn place(&self, path: &[Step], fault: Fault) -> Problem {
        let node = self.tree.nearest(path);
        Problem {
            line: node.line,
            at: node.at.clone(),
            fault,
        }
    }
}

/// A path that is said and not empty, or the default.
fn path(said: Option<&String>, default: &Path) -> PathBuf {
    match said.map(String::as_str) {
        None | Some("") => default.to_owned(),
        Some(said) => said.into(),
    }
}
