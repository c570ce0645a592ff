//! An Event as this process writes it: about one object, under a name of its own, with a note that the API server takes.
//! When one is written, and how often that is tried, is not decided here.

use gantry_api::names;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};

/// Longest note, in bytes: the API server takes 1,024.
pub(crate) const MAX_NOTE: usize = 1000;
/// Longest name the API server takes.
const MAX_NAME: usize = 253;

/// What an Event is about.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Regarding<'a> {
    pub(crate) api_version: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) namespace: &'a str,
    pub(crate) name: &'a str,
    pub(crate) uid: &'a str,
}

/// What an Event says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Message {
    /// In CamelCase, such as `GangReserved`.
    pub(crate) reason: &'static str,
    /// Something is wrong.
    pub(crate) warning: bool,
    /// In words. What is longer than a note may be is cut.
    pub(crate) note: String,
}

impl<'a> Regarding<'a> {
    /// A pod.
    pub(crate) fn pod(namespace: &'a str, name: &'a str, uid: &'a str) -> Self {
        Self {
            api_version: "v1",
            kind: "Pod",
            namespace,
            name,
            uid,
        }
    }

    /// A gang's object.
    pub(crate) fn gang(namespace: &'a str, name: &'a str, uid: &'a str) -> Self {
        Self {
            api_version: "gantry.dev/v1alpha1",
            kind: "Gang",
            namespace,
            name,
            uid,
        }
    }
}

/// The Event that says this about that, `now`.
pub(crate) fn event(about: Regarding<'_>, message: Message, now: jiff::Timestamp) -> Event {
    let mut note = message.note;
    if note.len() > MAX_NOTE {
        note.truncate(note.floor_char_boundary(MAX_NOTE));
        note.push_str(" ...");
    }
    Event {
        metadata: ObjectMeta {
            name: Some(name(about.name, now)),
            namespace: Some(about.namespace.to_owned()),
            ..ObjectMeta::default()
        },
        event_time: Some(MicroTime(now)),
        action: Some("Scheduling".to_owned()),
        reason: Some(message.reason.to_owned()),
        type_: Some(if message.warning { "Warning" } else { "Normal" }.to_owned()),
        note: Some(note),
        regarding: Some(ObjectReference {
            api_version: Some(about.api_version.to_owned()),
            kind: Some(about.kind.to_owned()),
            namespace: Some(about.namespace.to_owned()),
            name: Some(about.name.to_owned()),
            uid: Some(about.uid.to_owned()),
            ..ObjectReference::default()
        }),
        reporting_controller: Some(names::EXTENDER.to_owned()),
        reporting_instance: Some(names::EXTENDER.to_owned()),
        ..Event::default()
    }
}

/// A name for an Event about something of this name, which may itself be as long as names may be.
fn name(about: &str, now: jiff::Timestamp) -> String {
    let moment = format!("{:x}", now.as_nanosecond());
    let about = &about[..about.floor_char_boundary(MAX_NAME.saturating_sub(moment.len() + 1))];
    // A part of a name ends with a letter or digit.
    let about = about.trim_end_matches(['-', '.']);
    format!("{about}.{moment}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_cut_to_what_the_api_server_takes() {
        let message = Message {
            reason: "GangWaiting",
            warning: false,
            note: "ä".repeat(900),
        };
        let about = Regarding::gang("ml", "train", "u");
        let event = event(about, message, jiff::Timestamp::UNIX_EPOCH);
        assert!(event.note.unwrap().len() <= 1024);
        assert_eq!(event.regarding.unwrap().kind.as_deref(), Some("Gang"));
    }

    #[test]
    fn the_name_of_an_event_is_one_however_long_that_of_the_pod_is() {
        let now = jiff::Timestamp::from_second(1_767_225_600).unwrap();
        assert_eq!(name("a", now), "a.18867251edfa0000");
        let long = name(&"a".repeat(253), now);
        assert_eq!(long.len(), 253);
        assert!(long.ends_with("a.18867251edfa0000"), "{long}");
        // Where it is cut stands what no part of a name may end with.
        let odd = format!("{}.-.-{}", "a".repeat(232), "b".repeat(17));
        assert_eq!(name(&odd, now), format!("{}.18867251edfa0000", "a".repeat(232)));
        assert!(name(&"\u{e4}".repeat(200), now).len() <= 253);
    }
}
