//! What a person sees of the cluster: Events. Read as a person reads them; judges nothing.

use anyhow::{Result, ensure};
use gantry_e2e::until;
use k8s_openapi::api::core::v1::Event;
use kube::Api;
use kube::api::ListParams;

use crate::bed::Bed;
use crate::gangs::GANG_LIMIT;

/// Waits until the API server has an Event of this reason about an object, with these words, and checks that it is about the object of this UID,
/// where one is given: by that `kubectl describe` finds it.
pub(crate) async fn event(
    bed: &Bed,
    namespace: &str,
    (kind, name, uid): (&str, &str, Option<&str>),
    reason: &str,
    words: &[&str],
) -> Result<String> {
    let api: Api<Event> = Api::namespaced(bed.client(), namespace);
    let about = ListParams::default().fields(&format!(
        "involvedObject.kind={kind},involvedObject.name={name},reason={reason}"
    ));
    let found = until(
        format!("Event {reason} of {kind} {name} with {words:?}"),
        GANG_LIMIT,
        async || {
            let all = api.list(&about).await.map_err(|error| error.to_string())?.items;
            let said = |event: &Event| event.message.clone().unwrap_or_default();
            let event = all
                .iter()
                .find(|event| words.iter().all(|word| said(event).contains(word)));
            match event {
                Some(event) => Ok((said(event), event.involved_object.uid.clone())),
                None => Err(format!("{:?}", all.iter().map(said).collect::<Vec<_>>())),
            }
        },
    );
    let (said, of) = found.await?;
    ensure!(
        uid.is_none() || of.as_deref() == uid,
        "{reason} is about {of:?}, {kind} {name} is {uid:?}"
    );
    Ok(said)
}
