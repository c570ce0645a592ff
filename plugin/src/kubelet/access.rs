//! Why the plugin cannot reach kubelet, with the likely remedy. Texts and file checks only.

use std::error::Error;
use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// The remedy for a path that does not exist: kubelet's root may be another one.
const OTHER_ROOT: &str = "start kubelet, or mount the folder below its --root-dir and name it by --device-plugin-dir \
                          (docs/install.md lists k0s, microk8s and others)";

/// What is missing before a resource can be registered at the socket `kubelet` in `directory`; `None` if nothing is.
pub(super) fn missing(directory: &Path, kubelet: &Path) -> Option<String> {
    let folder = format!("kubelet's device plugin directory {}", directory.display());
    match fs::metadata(directory) {
        Err(error) => return Some(waiting(&folder, &error)),
        Ok(found) if !found.is_dir() => return Some(format!("{folder} is no directory; {OTHER_ROOT}")),
        Ok(_) => {}
    }
    let socket = format!("kubelet's registration socket {}", kubelet.display());
    match fs::metadata(kubelet) {
        Err(error) => Some(waiting(&socket, &error)),
        Ok(found) if !found.file_type().is_socket() => {
            Some(format!("waiting for {socket}, which is no socket now; remove the file and restart kubelet"))
        }
        Ok(_) => None,
    }
}

fn waiting(what: &str, error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => format!("waiting for {what}, which does not exist; {OTHER_ROOT}"),
        _ => format!("waiting for {what}: {}", with_remedy(error)),
    }
}

/// An error of a file operation, with its remedy.
pub(crate) fn with_remedy(error: &io::Error) -> String {
    format!("{error}{}", remedy(error))
}

/// The remedy for an error, after a semicolon; empty if the error speaks for itself.
fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "; run the plugin as root, and where SELinux is enforcing give it a type that may use the host's folders \
             (seLinuxOptions, docs/install.md); ausearch -m avc on the node shows denials"
        }
        io::ErrorKind::ReadOnlyFilesystem => "; mount the folder writable (volumeMounts without readOnly)",
        io::ErrorKind::NotFound => "; start kubelet, or name its folder by --device-plugin-dir",
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "; free space on the node's file system",
        io::ErrorKind::ConnectionRefused => {
            "; kubelet does not listen: it is starting, or the socket is left from an earlier one"
        }
        io::ErrorKind::InvalidInput => {
            "; the path of a socket has at most 107 bytes: mount the folder at a shorter path"
        }
        _ => "",
    }
}

/// The remedy for the first file error among the causes of `error`.
pub(super) fn remedy_of(error: &(dyn Error + 'static)) -> &'static str {
    let mut cause = Some(error);
    while let Some(current) = cause {
        if let Some(found) = current.downcast_ref::<io::Error>() {
            return remedy(found);
        }
        cause = current.source();
    }
    ""
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Other kubelet roots (k0s, microk8s), a wrong directory, a kubelet that is not started.
    #[test]
    fn what_is_missing_is_named_with_its_remedy() {
        let root = tempfile::tempdir().unwrap();
        let (folder, socket) =
            (root.path().join("device-plugins"), root.path().join("device-plugins/kubelet.sock"));
        let text = || missing(&folder, &socket).unwrap().replace(root.path().to_str().unwrap(), "");
        insta::assert_snapshot!(text(), @"waiting for kubelet's device plugin directory /device-plugins, which does not exist; start kubelet, or mount the folder below its --root-dir and name it by --device-plugin-dir (docs/install.md lists k0s, microk8s and others)");
        fs::write(&folder, "").unwrap();
        insta::assert_snapshot!(text(), @"kubelet's device plugin directory /device-plugins is no directory; start kubelet, or mount the folder below its --root-dir and name it by --device-plugin-dir (docs/install.md lists k0s, microk8s and others)");
        fs::remove_file(&folder).unwrap();
        fs::create_dir(&folder).unwrap();
        insta::assert_snapshot!(text(), @"waiting for kubelet's registration socket /device-plugins/kubelet.sock, which does not exist; start kubelet, or mount the folder below its --root-dir and name it by --device-plugin-dir (docs/install.md lists k0s, microk8s and others)");
        fs::write(&socket, "").unwrap();
        insta::assert_snapshot!(text(), @"waiting for kubelet's registration socket /device-plugins/kubelet.sock, which is no socket now; remove the file and restart kubelet");
        fs::remove_file(&socket).unwrap();
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        assert_eq!(missing(&folder, &socket), None);
    }

    #[test]
    fn denied_and_read_only_folders_have_their_own_remedies() {
        let text = |code| with_remedy(&io::Error::from_raw_os_error(code));
        insta::assert_snapshot!(text(13), @"Permission denied (os error 13); run the plugin as root, and where SELinux is enforcing give it a type that may use the host's folders (seLinuxOptions, docs/install.md); ausearch -m avc on the node shows denials");
        insta::assert_snapshot!(text(30), @"Read-only file system (os error 30); mount the folder writable (volumeMounts without readOnly)");
        insta::assert_snapshot!(text(28), @"No space left on device (os error 28); free space on the node's file system");
    }
}
