//! The network of a cluster: a bridge in the control plane's sandbox, and a cable to it from every node.
//! All of it lies in the sandboxes' network namespaces and goes with them. The one Service that has its address is the
//! API server's: pods reach it through the control plane's sandbox, which is their way to everywhere.

use crate::Result;
use crate::sandbox::{Sandbox, host_command};
use crate::settings::{CONTROL_ADDRESS, NAMES_ADDRESS, Place, SERVICE_ADDRESS};

const BRIDGE: &str = "br0";

/// Makes the bridge, and leads the API server's Service to its port.
pub(super) async fn bridge(control: &Sandbox, port: u16) -> Result<()> {
    let address = format!("{CONTROL_ADDRESS}/24");
    let names = format!("{NAMES_ADDRESS}/32");
    for line in [
        &["ip", "link", "add", BRIDGE, "type", "bridge"][..],
        &["ip", "addr", "add", &address, "dev", BRIDGE],
        &["ip", "addr", "add", &names, "dev", BRIDGE],
        &["ip", "link", "set", BRIDGE, "up"],
    ] {
        control.exec(line).await?;
    }
    let server = format!("{CONTROL_ADDRESS}:{port}");
    for chain in ["PREROUTING", "OUTPUT"] {
        let to_service = ["--destination", SERVICE_ADDRESS, "--protocol", "tcp", "--dport", "443"];
        let rule = [
            &["iptables", "--table", "nat", "--append", chain][..],
            &to_service,
            &["--jump", "DNAT", "--to-destination", &server],
        ];
        control.exec(&rule.concat()).await?;
    }
    Ok(())
}

/// Joins a node to the bridge, and its pods to everybody.
pub(super) async fn join(control: &Sandbox, node: &Sandbox, place: Place) -> Result<()> {
    let (network, peer) = (control.init_pid().to_string(), node.init_pid().to_string());
    let cable = node.name();
    // Both process ids are this machine's, so this one command must not enter a process namespace.
    let into = ["nsenter", "--target", &network, "--net", "--"];
    let add = ["ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", &peer];
    host_command(&[&into[..], &add].concat()).await?;

    let address = format!("{}/24", place.address());
    for line in [
        &["ip", "addr", "add", &address, "dev", "eth0"][..],
        &["ip", "link", "set", "eth0", "up"],
        &["ip", "route", "add", "default", "via", CONTROL_ADDRESS],
    ] {
        node.exec(line).await?;
    }
    for line in [
        &["ip", "link", "set", cable, "master", BRIDGE, "up"][..],
        &["ip", "route", "add", &place.pods(), "via", &place.address()],
    ] {
        control.exec(line).await?;
    }
    Ok(())
}
