//! Checks that the admission policies exist that narrow a daemon's rights. Without them a stolen token can do more than
//! the daemon does, and nothing else shows that.

use std::convert::Infallible;
use std::time::Duration;

use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use kube::{Api, Client};
use tracing::{debug, info, warn};

use crate::{Backoff, chain};

/// Pause between checks while all policies exist.
const INTERVAL: Duration = Duration::from_secs(3600);
/// Pause between checks while one is missing: the operator may apply it.
const MISSING_INTERVAL: Duration = Duration::from_secs(300);
/// Pauses while the API server does not respond.
const RETRY: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60)).with_jitter();

/// Checks at the start and then now and then which of these policies are missing, and passes their number to `report`.
/// A change is logged. A policy that may not be read counts as missing.
pub async fn follow(client: Client, names: &'static [&'static str], report: impl Fn(usize)) -> Infallible {
    let mut backoff = RETRY;
    let mut known: Option<Vec<&str>> = None;
    loop {
        let lacking = match missing(&client, names).await {
            Ok(lacking) => lacking,
            Err(error) => {
                debug!(error = %chain(&error), "cannot check the admission policies");
                tokio::time::sleep(backoff.fail()).await;
                continue;
            }
        };
        backoff.reset();
        report(lacking.len());
        let pause = if lacking.is_empty() { INTERVAL } else { MISSING_INTERVAL };
        if known.as_ref() != Some(&lacking) {
            match lacking.is_empty() {
                true => info!("the admission policies for this daemon exist"),
                false => warn!(
                    policies = lacking.join(", "),
                    "admission policies are missing or do not deny, so that a stolen token can do more than this daemon does; apply manifests/guard.yaml"
                ),
            }
        }
        known = Some(lacking);
        tokio::time::sleep(pause.mul_f32(1.0 + fastrand::f32() / 10.0)).await;
    }
}

/// Those of the policies that are missing, or whose binding of the same name does not deny everywhere.
///
/// # Errors
/// The API server does not respond.
pub async fn missing(client: &Client, names: &[&'static str]) -> Result<Vec<&'static str>, kube::Error> {
    let policies = Api::<ValidatingAdmissionPolicy>::all(client.clone());
    let bindings = Api::<ValidatingAdmissionPolicyBinding>::all(client.clone());
    let mut lacking = Vec::new();
    for name in names {
        let exists = readable(policies.get_metadata_opt(name).await)?.is_some();
        if !exists || !readable(bindings.get_opt(name).await)?.is_some_and(|binding| denies(&binding, name)) {
            lacking.push(*name);
        }
    }
    Ok(lacking)
}

/// A missing right and an API server without such policies are no failures: repeating the request does not help.
fn readable<T>(read: Result<Option<T>, kube::Error>) -> Result<Option<T>, kube::Error> {
    match read {
        Err(kube::Error::Api(status)) if matches!(status.code, 403 | 404) => Ok(None),
        read => read,
    }
}

fn denies(binding: &ValidatingAdmissionPolicyBinding, policy: &str) -> bool {
    binding.spec.as_ref().is_some_and(|spec| {
        let mut actions = spec.validation_actions.iter().flatten();
        spec.policy_name.as_deref() == Some(policy)
            && spec.match_resources.is_none()
            && actions.any(|action| action == "Deny")
    })
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;

    /// A client of an API server that answers each path like this.
    fn client(answer: impl Fn(&str) -> (u16, Value) + Send + 'static) -> Client {
        let (service, mut handle) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
        tokio::spawn(async move {
            while let Some((request, send)) = handle.next_request().await {
                let (code, body) = answer(request.uri().path());
                let response = Response::builder().status(code).body(body.to_string().into_bytes().into());
                send.send_response(response.unwrap());
            }
        });
        Client::new(service, "default")
    }

    fn refusal(code: u16) -> (u16, Value) {
        (
            code,
            json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no", "reason": "no", "code": code}),
        )
    }

    /// The policy or binding of a path, of which each policy denies.
    fn object(path: &str) -> (u16, Value) {
        let name = path.rsplit('/').next().unwrap();
        let kind = match path.contains("bindings/") {
            true => "ValidatingAdmissionPolicyBinding",
            false => "ValidatingAdmissionPolicy",
        };
        let spec = json!({"policyName": name, "validationActions": ["Deny"]});
        let api = "admissionregistration.k8s.io/v1";
        (200, json!({"apiVersion": api, "kind": kind, "metadata": {"name": name}, "spec": spec}))
    }

    #[tokio::test]
    async fn policy_without_denying_binding_is_missing() {
        let (_, denied) = object("bindings/here");
        let changed = |path: &str, field: &str, value: Value| {
            let (code, mut object) = object(path);
            object["spec"][field] = value;
            (code, object)
        };
        let client = client(move |path| match path.rsplit('/').next().unwrap() {
            "gone" => refusal(404),
            "unreadable" => refusal(403),
            "unbound" if path.contains("bindings/") => refusal(404),
            "audit" => changed(path, "validationActions", json!(["Audit", "Warn"])),
            "partial" => changed(path, "matchResources", json!({"namespaceSelector": {}})),
            "other" => changed(path, "policyName", denied["spec"]["policyName"].clone()),
            _ => object(path),
        });
        let names = ["here", "gone", "unreadable", "unbound", "audit", "partial", "other"];
        assert_eq!(missing(&client, &names).await.unwrap(), names[1..]);
        assert_eq!(missing(&client, &["here"]).await.unwrap(), Vec::<&str>::new());
    }

    /// A policy that is applied later is noticed, and an API server that is away does not count.
    #[tokio::test(start_paused = true)]
    async fn number_of_missing_policies_is_reported_again() {
        let requests = Arc::new(Mutex::new(0));
        let client = client(move |path| {
            let mut requests = requests.lock().unwrap();
            *requests += 1;
            match *requests {
                1 => refusal(503),
                2 => refusal(404),
                _ => object(path),
            }
        });
        let (send, mut reports) = tokio::sync::mpsc::unbounded_channel();
        let following = tokio::spawn(follow(client, &["here"], move |count| send.send(count).unwrap()));
        assert_eq!(reports.recv().await, Some(1));
        let begin = tokio::time::Instant::now();
        assert_eq!(reports.recv().await, Some(0));
        assert!(begin.elapsed() >= MISSING_INTERVAL && begin.elapsed() < INTERVAL);
        following.abort();
    }
}
