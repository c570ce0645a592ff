//! Events of the extender: on pods and on Gangs.

use gantry_api::{ObjectMessage, Reason, names};
use gantry_runtime::events::{self, EventRecorder, Message};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;

/// Writes the extender's Events.
pub(crate) fn recorder(client: Client) -> EventRecorder {
    EventRecorder::new(client, names::EXTENDER, names::EXTENDER)
}

/// The content of an Event of the extender.
pub(crate) fn message(reason: Reason, warning: bool, note: impl AsRef<str>) -> Message {
    Message { reason, action: "Scheduling", warning, note: ObjectMessage::new(note) }
}

/// The pod that an Event is about.
pub(crate) fn pod(namespace: &str, name: &str, uid: &str) -> ObjectReference {
    events::object(("v1", "Pod"), namespace, name, uid)
}

/// The Gang that an Event is about.
pub(crate) fn gang(namespace: &str, name: &str, uid: &str) -> ObjectReference {
    events::object(("gantry.dev/v1alpha1", "Gang"), namespace, name, uid)
}
