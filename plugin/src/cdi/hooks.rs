//! The hooks of NVIDIA's toolkit. There are none if its program is not on the host or the configuration leaves them out: a runtime
//! fails every container on a hook that it cannot run.

use super::host::Host;
use super::spec::Hook;
use gantry_config::{CdiHook, Config};

/// `hook` with these arguments, if it exists and is not disabled.
pub(super) fn hook(
    config: &Config,
    host: &Host,
    hook: CdiHook,
    arguments: impl IntoIterator<Item = String>,
) -> Option<Hook> {
    let off = &config.cdi_disabled_hooks;
    if !host.hooks || off.contains(&CdiHook::All) || off.contains(&hook) {
        return None;
    }
    let name = match hook {
        CdiHook::CreateSymlinks => "create-symlinks",
        CdiHook::UpdateLdcache => "update-ldcache",
        CdiHook::EnableCudaCompat => "enable-cuda-compat",
        CdiHook::DisableDeviceNodeModification => "disable-device-node-modification",
        // This plugin does not write these.
        CdiHook::All | CdiHook::Chmod | CdiHook::UpdateApplicationProfile => return None,
    };
    let program = config.cdi_hook_path.file_name()?.to_str()?;
    // The hooks are either a program of their own or a command of the toolkit.
    let command = (program == "nvidia-ctk").then_some("hook");
    Some(Hook {
        hook_name: "createContainer",
        path: config.cdi_hook_path.clone(),
        args: [program]
            .into_iter()
            .chain(command)
            .chain([name])
            .map(str::to_owned)
            .chain(arguments)
            .collect(),
    })
}

/// `--link target::link` for every pair; `None` without pairs.
pub(super) fn links(
    config: &Config,
    host: &Host,
    pairs: impl IntoIterator<Item = (String, String)>,
) -> Option<Hook> {
    let arguments: Vec<String> = pairs
        .into_iter()
        .flat_map(|(target, link)| ["--link".to_owned(), format!("{target}::{link}")])
        .collect();
    if arguments.is_empty() {
        return None;
    }
    hook(config, host, CdiHook::CreateSymlinks, arguments)
}
