//! Rules over the values of a config file: defaults, contradictions, settings that are not served. A pure function of the file.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use gantry_api::{ResourceName, names};

use super::file::{Discovery, File, Flags};
use super::problem::nearest;
use super::read::MAX_PROBLEMS;
use super::tree::{Node, Step};
use super::value::{Resource, Strategies, mig_resource, spelled};
use super::{
    Config, DeviceRef, Fault, Gfd, Imex, MigStrategy, Problem, ReplicatedDevices, ReplicatedResource,
    ResourcePattern, TimeSlicing,
};

/// The names of MIG devices that no pattern matches.
const MIG_RESOURCES: &str = "nvidia.com/mig-<profile>";
/// Most names in one warning.
const MAX_LISTED: usize = 32;
/// Longest name after the slash of an annotation's key.
const MAX_ANNOTATION: usize = 63;
/// Length of the name after the prefix of the annotations with CDI names.
const ANNOTATION: usize = "nvidia-device-plugin_00000000-0000-0000-0000-000000000000".len();

/// The configuration, warnings, and problems. `tree` has the place of each value; `gpu_resource` is the name of whole GPUs that a flag
/// gives.
pub(super) fn resolve(
    file: File,
    tree: &Node,
    gpu_resource: Option<&ResourceName>,
) -> (Config, Vec<Problem>, Vec<Problem>) {
    let mut resolver = Resolver { tree, warnings: Vec::new(), problems: Vec::new() };
    let config = resolver.config(file);
    resolver.absent_names(&config, gpu_resource);
    resolver.ignored_by_nvidia(&config);
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
        self.absolute(&["flags", "nvidiaDriverRoot"], file.flags.nvidia_driver_root.as_ref());
        self.absolute(&["flags", "nvidiaDevRoot"], file.flags.nvidia_dev_root.as_ref());
        self.absolute(&["flags", "plugin", "nvidiaCTKPath"], plugin.nvidia_ctk_path.as_ref());
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
        let mut time_slicing = file.sharing.time_slicing;
        if let Some(shared) = &mut time_slicing {
            self.sharing(shared);
        }
        self.patterns("gpus", &file.resources.gpus);
        self.patterns("mig", &file.resources.mig);
        let mut feature_flags = plugin.cdi_feature_flags.clone().unwrap_or_default();
        feature_flags.sort_unstable();
        feature_flags.dedup();
        let mut disabled_hooks = plugin.cdi_disable_hooks.clone().unwrap_or_default();
        disabled_hooks.sort_unstable();
        disabled_hooks.dedup();
        Config {
            mig_strategy,
            fail_on_init_error: file.flags.fail_on_init_error.unwrap_or(default.fail_on_init_error),
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
            pod_metrics: plugin.pod_metrics.unwrap_or_default(),
            nccl_topology: plugin.nccl_topology.unwrap_or_default(),
            gdrcopy: file.flags.gdrcopy_enabled.unwrap_or_default(),
            gds: file.flags.gds_enabled.unwrap_or_default(),
            mofed: file.flags.mofed_enabled.unwrap_or_default(),
            imex: Imex {
                channel: file.imex.channel_ids.unwrap_or_default().0,
                required: file.imex.required.unwrap_or_default(),
            },
            shared_devices: plugin.shared_devices_allocation_policy,
            gfd: self.gfd(&file.flags),
            gpu_patterns: file.resources.gpus,
            mig_patterns: file.resources.mig,
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

    /// Refuses a path of the host that is not absolute.
    fn absolute(&mut self, keys: &[&str], path: Option<&String>) {
        if let Some(path) = path.filter(|path| !path.is_empty() && !path.starts_with('/')) {
            let text = format!(
                "{path:?} is not an absolute path of the host, which runtimes require: begin it with /"
            );
            self.refuse(keys, Fault::Invalid(text));
        }
    }

    /// The prefix of annotations, if it is set. With a name after it, it must be the key of an annotation.
    fn annotation_prefix(&mut self, prefix: Option<&String>) -> Option<String> {
        let prefix = prefix.filter(|prefix| !prefix.is_empty())?;
        let is_key = prefix.split_once('/').is_some_and(|(domain, name)| {
            let inside = |ch: char| ch.is_ascii_alphanumeric() || "-_.".contains(ch);
            names::is_subdomain(domain)
                && name.chars().all(inside)
                && name.chars().next().is_none_or(|first| first.is_ascii_alphanumeric())
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
        let given = &flags.gfd;
        let sleep_interval = match given.sleep_interval {
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
            oneshot: given.oneshot.unwrap_or_default(),
            no_timestamp: given.no_timestamp.unwrap_or_default(),
            sleep_interval,
            output_file: match given.output_file.as_deref() {
                None => default.output_file,
                Some("") => None,
                Some(file) => Some(file.into()),
            },
            machine_type_file: path(given.machine_type_file.as_ref(), &default.machine_type_file),
            use_node_feature_api: flags.use_node_feature_api.unwrap_or(default.use_node_feature_api),
        }
    }

    fn patterns(&mut self, section: &str, patterns: &[ResourcePattern]) {
        let mut first: HashMap<String, usize> = HashMap::new();
        for (index, entry) in patterns.iter().enumerate() {
            let place = [key("resources"), key(section), Step::Index(index), key("pattern")];
            let pattern = match section {
                "mig" => spelled(&entry.pattern),
                _ => entry.pattern.clone(),
            };
            if pattern.is_empty() {
                let text = "an empty pattern matches nothing; * matches everything".to_owned();
                self.refuse_at(&place, Fault::Invalid(text));
                continue;
            }
            let hides = [pattern.as_str(), "*"].into_iter().filter_map(|pattern| first.get(pattern));
            if let Some(before) = hides.min() {
                let before = self.at(&[key("resources"), key(section), Step::Index(*before)]);
                let text = format!("{:?} never counts: {before} matches all of it first", entry.pattern);
                self.refuse_at(&place, Fault::Contradiction(text));
            }
            first.entry(pattern).or_insert(index);
        }
    }

    fn sharing(&mut self, shared: &mut TimeSlicing) {
        for (index, entry) in shared.resources.iter_mut().enumerate() {
            if matches!(&entry.devices, ReplicatedDevices::Listed(list) if list.is_empty()) {
                entry.devices = ReplicatedDevices::All;
                self.warn_at(
                    &entry_key(index, "devices"),
                    "the list is empty, which means all devices, as with NVIDIA's plugin; leave the key out instead"
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
        for (index, entry) in shared.resources.iter().enumerate() {
            if shared.rename_by_default && entry.rename.is_none() {
                let name = format!("{}.shared", entry.name);
                if let Err(text) = Resource::try_from(name) {
                    self.refuse_at(&entry_key(index, "name"), Fault::Invalid(text));
                }
            }
        }
        self.shared_twice(&shared.resources);
    }

    /// Refuses entries that share a device which an earlier entry shares.
    fn shared_twice(&mut self, entries: &[ReplicatedResource]) {
        let mut first = HashMap::new();
        let mut unlisted = HashMap::new();
        let mut listed: HashMap<(&ResourceName, &DeviceRef), usize> = HashMap::new();
        for (index, entry) in entries.iter().enumerate() {
            let name = &entry.name;
            let place = |entry: usize| self.at(&entry_key(entry, "name")[..4]);
            let both = |before: &usize| {
                format!(
                    "{name} is shared by {} already; to share its devices differently, list them in both entries",
                    place(*before)
                )
            };
            let text = match &entry.devices {
                ReplicatedDevices::Listed(list) => {
                    let repeated =
                        list.iter().find_map(|device| match listed.insert((name, device), index)? {
                            before if before == index => Some(format!("device {device} is listed twice")),
                            before => Some(format!(
                                "device {device} of {name} is shared by {} already",
                                place(before)
                            )),
                        });
                    repeated.or_else(|| unlisted.get(name).map(both))
                }
                _ => {
                    unlisted.entry(name).or_insert(index);
                    first.get(name).map(both)
                }
            };
            first.entry(name).or_insert(index);
            if let Some(text) = text {
                self.refuse_at(&entry_key(index, "devices"), Fault::Contradiction(text));
            }
        }
    }

    /// Warns of the keys that NVIDIA's plugin reads and ignores: with the same file, pods must ask for other resources here.
    fn ignored_by_nvidia(&mut self, config: &Config) {
        let mut warn = |path: &[Step]| {
            self.warn_at(path, "NVIDIA's plugin ignores this key; here it is applied".to_owned());
        };
        for (section, patterns) in [("gpus", &config.gpu_patterns), ("mig", &config.mig_patterns)] {
            if !patterns.is_empty() {
                warn(&[key("resources"), key(section)]);
            }
        }
        let Some(sharing) = &config.time_slicing else {
            return;
        };
        for (index, entry) in sharing.resources.iter().enumerate() {
            let theirs = match sharing.rename_by_default {
                true => ResourceName::from(format!("{}.shared", entry.name)),
                false => entry.name.clone(),
            };
            if entry.rename.as_ref().is_some_and(|ours| *ours != theirs) {
                warn(&entry_key(index, "rename"));
            }
            if entry.devices != ReplicatedDevices::All {
                warn(&entry_key(index, "devices"));
            }
        }
    }

    /// Warns of entries that share a resource which no device of any node is advertised as: probably a typing error, and NVIDIA's plugin
    /// reports nothing. `gpu_resource` is the name of whole GPUs that a flag gives.
    fn absent_names(&mut self, config: &Config, gpu_resource: Option<&ResourceName>) {
        let renamed = config
            .gpu_patterns
            .iter()
            .find(|entry| entry.pattern == "*")
            .map(|entry| &entry.name)
            .or(gpu_resource);
        let by_default = renamed.is_none().then_some(names::GPU_RESOURCE);
        let patterns =
            config.gpu_patterns.iter().chain(&config.mig_patterns).map(|entry| entry.name.as_str());
        let mut all = HashSet::new();
        let given = by_default.into_iter().chain(patterns).chain(gpu_resource.map(ResourceName::as_str));
        let mut listed: Vec<&str> = given.filter(|name| all.insert(*name)).collect();
        listed.truncate(MAX_LISTED);
        let mut allowed = listed.clone();
        allowed.insert(1.min(allowed.len()), MIG_RESOURCES);
        let mut allowed = allowed.join(", ");
        if all.len() > listed.len() {
            allowed.push_str(&format!(" and {} more", all.len() - listed.len()));
        }
        let of_mig: HashSet<&ResourceName> = config.mig_patterns.iter().map(|entry| &entry.name).collect();
        let entries = config.time_slicing.iter().flat_map(|sharing| &sharing.resources);
        for (index, ReplicatedResource { name, .. }) in entries.enumerate() {
            if self.warnings.len() > MAX_PROBLEMS {
                return;
            }
            let text = if of_mig.contains(name) || name.as_str().contains("/mig-") {
                let is_served = match config.mig_strategy {
                    MigStrategy::Mixed => true,
                    MigStrategy::Single => of_mig.contains(name),
                    MigStrategy::None => false,
                };
                if is_served {
                    continue;
                }
                format!("{name} is advertised only where migStrategy is mixed: this entry has no effect")
            } else if all.contains(name.as_str()) {
                continue;
            } else {
                // A name after sharing stands for the name before.
                let unshared = name.as_str().strip_suffix(".shared").unwrap_or(name.as_str());
                let near = match renamed {
                    Some(renamed) if unshared == names::GPU_RESOURCE => Some(renamed.to_string()),
                    _ => mig_resource(unshared).or_else(|| nearest(unshared, listed.iter().copied())),
                };
                let near = near.map_or(String::new(), |near| format!("; did you mean {near:?}?"));
                format!(
                    "no device is called {name} before it is shared, so that this entry has no effect; allowed: {allowed}{near}"
                )
            };
            self.warn_at(&entry_key(index, "name"), text);
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

    /// The place in the file: wrong entries before it are not in the tree, but count in the file.
    fn at(&self, path: &[Step]) -> &str {
        &self.tree.nearest(path).at
    }

    fn place(&self, path: &[Step], fault: Fault) -> Problem {
        let node = self.tree.nearest(path);
        Problem { line: node.line, at: node.at.clone(), fault }
    }
}

/// A path that is set and not empty, or the default.
fn path(given: Option<&String>, default: &Path) -> PathBuf {
    match given.map(String::as_str) {
        None | Some("") => default.to_owned(),
        Some(given) => given.into(),
    }
}

fn key(name: &str) -> Step {
    Step::Key(name.to_owned())
}

/// The path of a key of an entry of `sharing.timeSlicing.resources`.
fn entry_key(index: usize, name: &str) -> [Step; 5] {
    [key("sharing"), key("timeSlicing"), key("resources"), Step::Index(index), key(name)]
}
