//! What a person sees of the cluster: kubectl's tables, Events, `gantry explain`, and the extender's metrics. Read as a
//! person or Prometheus reads them, from their text; judges nothing.

use anyhow::{Context, Result, ensure};
use gantry_api::{GpuNode, Reason};
use gantry_e2e::{Sandbox, gantry, until};
use k8s_openapi::api::core::v1::Event;
use kube::Api;
use kube::api::ListParams;

use crate::bed::Bed;
use crate::gangs::GANG_LIMIT;

/// Where the manifests have the extender serve its metrics.
const METRICS: &str = "http://127.0.0.1:8011/metrics";
/// The address at which the leader serves metrics, too: of several extenders only this one certainly leads to the
/// leader.
const METRICS_OF_LEADER: &str = "http://127.0.0.1:8010/metrics";

/// A table that kubectl has printed.
#[derive(Debug)]
pub(crate) struct Table(String);

impl Table {
    /// What `kubectl get <kind> -o wide` prints of a namespace.
    pub(crate) async fn get(bed: &Bed, namespace: &str, kind: &str) -> Result<Self> {
        let args = ["-n", namespace, "get", kind, "-o", "wide"];
        Ok(Self(bed.cluster().kubectl(&args).await?))
    }

    /// The headings of its columns.
    pub(crate) fn columns(&self) -> Vec<&str> {
        self.starts().into_iter().map(|(_, heading)| heading).collect()
    }

    /// What stands in a column of the line that begins with `name`.
    pub(crate) fn cell(&self, name: &str, column: &str) -> Result<&str> {
        let starts = self.starts();
        let place = starts.iter().position(|(_, heading)| *heading == column);
        let place = place.with_context(|| format!("no column {column} in\n{}", self.0))?;
        let line = self.0.lines().find(|line| line.split_whitespace().next() == Some(name));
        let line = line.with_context(|| format!("no line of {name} in\n{}", self.0))?;
        let from = starts.get(place).map_or(0, |(from, _)| *from);
        let to = starts.get(place + 1).map_or(line.len(), |(to, _)| *to);
        let cell = line.get(from..to.min(line.len()));
        Ok(cell.unwrap_or_default().trim())
    }

    /// Each column's heading, and where it begins. Between two there are three spaces; a heading may have one.
    fn starts(&self) -> Vec<(usize, &str)> {
        let head = self.0.lines().next().unwrap_or_default();
        let headings = head.split("  ").map(str::trim).filter(|text| !text.is_empty());
        let mut from = 0;
        headings
            .map(|heading| {
                let found = head.get(from..).and_then(|rest| rest.find(heading));
                let start = from + found.unwrap_or_default();
                from = start + heading.len();
                (start, heading)
            })
            .collect()
    }
}

/// Waits until the API server has an Event of this reason about an object, with these words, and checks that it is
/// about the object of this UID, where one is given: by that `kubectl describe` finds it.
pub(crate) async fn event(
    bed: &Bed,
    namespace: &str,
    (kind, name, uid): (&str, &str, Option<&str>),
    reason: &str,
    words: &[&str],
) -> Result<String> {
    let api: Api<Event> = Api::namespaced(bed.client(), namespace);
    let about = ListParams::default()
        .fields(&format!("involvedObject.kind={kind},involvedObject.name={name},reason={reason}"));
    let found = until(format!("Event {reason} of {kind} {name} with {words:?}"), GANG_LIMIT, async || {
        let all = api.list(&about).await.map_err(|error| error.to_string())?.items;
        let said = |event: &Event| event.message.clone().unwrap_or_default();
        let event = all.iter().find(|event| words.iter().all(|word| said(event).contains(word)));
        match event {
            Some(event) => Ok((said(event), event.involved_object.uid.clone())),
            None => Err(format!("{:?}", all.iter().map(said).collect::<Vec<_>>())),
        }
    });
    let (said, of) = found.await?;
    ensure!(uid.is_none() || of.as_deref() == uid, "{reason} is about {of:?}, {kind} {name} is {uid:?}");
    Ok(said)
}

/// Waits until a GpuNode is as it should be.
pub(crate) async fn gpu_node(
    bed: &Bed,
    node: &str,
    what: &str,
    is_so: impl Fn(&GpuNode) -> bool,
) -> Result<GpuNode> {
    let api: Api<GpuNode> = Api::all(bed.client());
    let found = until(format!("GpuNode {node}: {what}"), GANG_LIMIT, async || {
        let object = api.get(node).await.map_err(|error| error.to_string())?;
        if is_so(&object) {
            return Ok(object);
        }
        let conditions = object.status.map(|status| status.conditions);
        Err(format!("{:?}, {conditions:?}", object.metadata.owner_references))
    });
    Ok(found.await?)
}

/// Whether the condition `Ready` of a GpuNode has this reason.
pub(crate) fn ready_is(reason: Reason) -> impl Fn(&GpuNode) -> bool {
    move |object| {
        let conditions = object.status.iter().flat_map(|status| &status.conditions);
        let mut ready = conditions.filter(|condition| condition.type_ == "Ready");
        ready.any(|condition| condition.reason == reason.as_str())
    }
}

/// Waits until a probe of a daemon returns this code, with these words in its text.
pub(crate) async fn probe(place: &Sandbox, port: u16, path: &str, code: u16, words: &str) -> Result<()> {
    // busybox shows no text of a failed request.
    let ask =
        format!("exec 3<>/dev/tcp/127.0.0.1/{port}; printf 'GET {path} HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3");
    let found = until(format!("{path} is {code} with {words:?}"), GANG_LIMIT, async || {
        let text = place.exec(&["bash", "-c", &ask]).await.map_err(|error| error.to_string())?;
        let is_code = text.split(' ').nth(1) == Some(&code.to_string());
        if is_code && text.contains(words) { Ok(()) } else { Err(text) }
    });
    Ok(found.await?)
}

/// Waits until a daemon's metrics contain this line.
pub(crate) async fn reports(place: &Sandbox, port: u16, line: &str) -> Result<()> {
    let url = format!("http://127.0.0.1:{port}/metrics");
    let found = until(format!("{line:?}"), GANG_LIMIT, async || {
        let page = place.exec(&["busybox", "wget", "-q", "-O", "-", &url]).await;
        let page = page.map_err(|error| error.to_string())?;
        let name = line.split(' ').next().unwrap_or_default();
        match page.lines().any(|found| found == line) {
            true => Ok(()),
            false => Err(format!("{:?}", page.lines().find(|found| found.starts_with(name)))),
        }
    });
    Ok(found.await?)
}

/// The output of `gantry explain`.
pub(crate) async fn explained(bed: &Bed, words: &[&str]) -> Result<String> {
    let binary = gantry::binary().context("no gantry beside this test: cargo build -p gantry")?;
    let binary = binary.display().to_string();
    let kubeconfig = format!("--kubeconfig={}", bed.cluster().kubeconfig().display());
    let argv = [&[&*binary, "explain"], words, &[&*kubeconfig]].concat();
    Ok(bed.cluster().control().exec(&argv).await?)
}

/// The extender's metrics at one moment.
#[derive(Debug)]
pub(crate) struct Metrics(String);

impl Metrics {
    /// Reads them.
    pub(crate) async fn read(bed: &Bed) -> Result<Self> {
        Self::read_at(bed, METRICS).await
    }

    async fn read_at(bed: &Bed, url: &str) -> Result<Self> {
        let control = bed.cluster().control();
        let page = control.exec(&["busybox", "wget", "-q", "-O", "-", url]).await?;
        Ok(Self(page))
    }

    /// The value of a series, by its text without `gantry_extender_`, such as `gangs{phase="bound"}`. A counter that
    /// has not begun is not served, and is 0.
    pub(crate) fn of(&self, series: &str) -> f64 {
        let wanted = format!("gantry_extender_{series} ");
        let line = self.0.lines().find_map(|line| line.strip_prefix(&wanted));
        line.and_then(|value| value.trim().parse().ok()).unwrap_or_default()
    }

    /// Waits until series are what they should be.
    pub(crate) async fn settled(bed: &Bed, expected: &[(&str, f64)]) -> Result<Self> {
        Self::settled_at(bed, METRICS, expected).await
    }

    /// The same of the one of several extenders that leads.
    pub(crate) async fn settled_with_leader(bed: &Bed, expected: &[(&str, f64)]) -> Result<Self> {
        Self::settled_at(bed, METRICS_OF_LEADER, expected).await
    }

    async fn settled_at(bed: &Bed, url: &str, expected: &[(&str, f64)]) -> Result<Self> {
        let found = until(format!("metrics {expected:?}"), GANG_LIMIT, async || {
            let now = Self::read_at(bed, url).await.map_err(|error| format!("{error:#}"))?;
            let others = expected.iter().filter(|(series, value)| (now.of(series) - value).abs() > 0.1);
            let others: Vec<String> =
                others.map(|(series, _)| format!("{series} is {}", now.of(series))).collect();
            match others.is_empty() {
                true => Ok(now),
                false => Err(others.join(", ")),
            }
        });
        Ok(found.await?)
    }
}
