//! `gantry drain gpu`: cordons a GPU and evicts what holds it, until nothing does. Each pod is evicted by its UID; a gang
//! goes as a whole, once disruption budgets allow all of its pods.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use gantry_api::{Cordon, Cordons, GpuNode};
use gantry_extender::offline;
use gantry_runtime::chain;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, EvictParams, Preconditions};
use kube::core::{Selector, SelectorExt as _};
use kube::{Api, Client};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::target::Target;
use super::{DrainArgs, DrainOptions, DrainWhat, TIMEOUT, cordon, holders};
use crate::map::list;
use crate::runtime::{BadInput, print};
use crate::visible::Visible;

/// Pause between two looks at the pods.
const PAUSE: Duration = Duration::from_secs(1);
/// Timeout for reading the cluster.
const LIMIT: Duration = Duration::from_secs(30);
/// Requests in a row that may fail, while the API server restarts.
const FAILURES: u32 = 5;
/// Pods that a line names.
const NAMED: usize = 8;
/// The annotation of pods that kubelet makes from files on its node.
const MIRROR: &str = "kubernetes.io/config.mirror";

/// Runs `gantry drain`.
///
/// # Errors
/// The cluster has no such GPU, or the GPU is not empty in time.
pub(crate) async fn drain(args: DrainArgs, shutdown: CancellationToken) -> anyhow::Result<()> {
    let DrainWhat::Gpu(options) = args.what;
    let words = std::slice::from_ref(&options.gpu);
    let (client, _, found) = cordon::read(&options.cluster, words).await?;
    let target = found.into_iter().next().context("one GPU is named")?;
    let mut drain = Drain { client, options, target, evicted: BTreeSet::new(), last_line: String::new() };
    let stopped = shutdown.run_until_cancelled(drain.run()).await;
    let ended = stopped.unwrap_or_else(|| Err(anyhow!("interrupted")));
    ended.map_err(|error| anyhow!("{}; {}", chain(error.as_ref()), drain.left()))
}

/// The work on one GPU.
struct Drain {
    client: Client,
    options: DrainOptions,
    target: Target,
    /// Pods that were evicted: `namespace/name`.
    evicted: BTreeSet<String>,
    /// The last line of progress.
    last_line: String,
}

/// A pod that has to go.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Holder {
    namespace: String,
    name: String,
    uid: String,
    labels: BTreeMap<String, String>,
    /// It is being deleted.
    leaving: bool,
    /// A controller makes another one.
    controlled: bool,
    /// It comes from a file on its node.
    fixed: bool,
}

/// Pods that go together.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Group {
    gang: Option<String>,
    pods: Vec<Holder>,
}

/// A disruption budget.
struct Budget {
    namespace: String,
    name: String,
    /// Matches no pod if it cannot be read: the API server refuses the eviction then.
    selector: Option<Selector>,
    allowed: i32,
}

impl Drain {
    async fn run(&mut self) -> anyhow::Result<()> {
        if self.options.dry_run {
            return self.rehearse().await;
        }
        let begin = Instant::now();
        let deadline = begin + Duration::from_secs(self.options.timeout.into());
        let reason = match self.options.reason.as_str() {
            "" => "to be drained".to_owned(),
            reason => reason.to_owned(),
        };
        let cordon = Cordon { reason, by: cordon::user(&self.client).await, since: Some(Timestamp::now()) };
        match cordon::set(&self.client, &self.target, Some(&cordon)).await? {
            Some(known) => self.report(format!("{} is already {known}", self.target))?,
            None => self.report(format!("{} {cordon}", self.target))?,
        }
        let mut groups: Vec<Group> = Vec::new();
        loop {
            let node = self.node().await?;
            self.refresh(&mut groups).await?;
            if groups.is_empty() {
                groups = self.look(&node).await?;
                refused(&groups, self.options.force)?;
            }
            let leaving = holders(&node, self.target.index);
            if groups.is_empty() && leaving.is_empty() {
                let seconds = begin.elapsed().as_secs();
                return self.report(format!("{} is drained: no pod holds it ({seconds} s)", self.target));
            }
            let waits = self.advance(&groups, &leaving).await?;
            if Instant::now() >= deadline {
                let seconds = self.options.timeout;
                return Err(anyhow!("{} is not drained after {seconds} s: {waits}", self.target));
            }
            self.report(waits)?;
            tokio::time::sleep(PAUSE.min(deadline.saturating_duration_since(Instant::now()))).await;
        }
    }

    /// Prints what would be evicted, and whether the API server would allow it now.
    async fn rehearse(&mut self) -> anyhow::Result<()> {
        let node = self.node_of(false).await?;
        let groups = self.look(&node).await?;
        if groups.is_empty() {
            return self.report(format!("no pod holds {}; it would be cordoned", self.target));
        }
        self.report(format!("{} would be cordoned, and evicted:", self.target))?;
        let budgets = self.budgets(&groups).await?;
        for group in &groups {
            let mut line = group.to_string();
            if let Some(blocked) = blocked(group, &budgets) {
                line.push_str(&format!("; not yet: {blocked}"));
            } else {
                for pod in group.pods.iter().filter(|pod| !pod.leaving) {
                    if let Evicted::Blocked(why) = self.evict(pod, true).await? {
                        line.push_str(&format!("; not yet: {pod}: {why}"));
                        break;
                    }
                }
            }
            self.report(line)?;
        }
        refused(&groups, self.options.force)
    }

    /// Evicts what may be evicted now, and returns what is waited for.
    async fn advance(
        &mut self,
        groups: &[Group],
        leaving: &BTreeSet<(String, String)>,
    ) -> anyhow::Result<String> {
        let budgets = self.budgets(groups).await?;
        let mut waits = Vec::new();
        for group in groups {
            if let Some(why) = blocked(group, &budgets) {
                waits.push(format!("{group}: {why}"));
                continue;
            }
            let mut going = Vec::new();
            for pod in &group.pods {
                if pod.leaving {
                    going.push(pod.to_string());
                    continue;
                }
                match self.evict(pod, false).await? {
                    Evicted::Done => {
                        if self.evicted.insert(pod.to_string()) {
                            let of = group
                                .gang
                                .as_ref()
                                .map_or_else(String::new, |gang| format!(" of gang {gang}"));
                            self.report(format!("evicted {pod}{of}"))?;
                        }
                        going.push(pod.to_string());
                    }
                    Evicted::Gone => {}
                    Evicted::Blocked(why) => waits.push(format!("{pod}: {why}")),
                }
            }
            if !going.is_empty() {
                waits.push(format!("waiting for the end of {}", some(&going)));
            }
        }
        if groups.is_empty() {
            let pods: Vec<String> = leaving.iter().map(|(space, pod)| format!("{space}/{pod}")).collect();
            waits.push(format!("waiting for the processes of {}", some(&pods)));
        }
        Ok(waits.join("; "))
    }

    /// The pods that hold the GPU now: those that the extender's ledger has, with their gangs, and others that the plugin
    /// reports.
    async fn look(&self, node: &GpuNode) -> anyhow::Result<Vec<Group>> {
        let settings = self.options.system.settings(self.client.clone()).await;
        let terms = settings.terms().map_err(BadInput)?;
        let seen = offline::look(self.client.clone(), terms, LIMIT).await?;
        let index = usize::from(self.target.index);
        let known = seen.store.read(|store| store.occupants(&self.target.node, index));
        let mut groups = Vec::new();
        let mut named = BTreeSet::new();
        for occupants in known {
            let mut group = Group { gang: occupants.gang, pods: Vec::new() };
            for pod in occupants.pods {
                named.insert((pod.namespace.to_string(), pod.name.to_string()));
                group.pods.extend(self.holder(&pod.namespace, &pod.name, Some(pod.uid.as_str())).await?);
            }
            groups.push(group);
        }
        for (namespace, pod) in holders(node, self.target.index) {
            if !named.contains(&(namespace.clone(), pod.clone())) {
                let pods = self.holder(&namespace, &pod, None).await?.into_iter().collect();
                groups.push(Group { gang: None, pods });
            }
        }
        groups.retain(|group| !group.pods.is_empty());
        Ok(groups)
    }

    /// Reads the pods again, and forgets those that are gone.
    async fn refresh(&self, groups: &mut Vec<Group>) -> anyhow::Result<()> {
        for group in groups.iter_mut() {
            let mut pods = Vec::new();
            for pod in &group.pods {
                pods.extend(self.holder(&pod.namespace, &pod.name, Some(&pod.uid)).await?);
            }
            group.pods = pods;
        }
        groups.retain(|group| !group.pods.is_empty());
        Ok(())
    }

    /// A pod, unless it is gone or another one has its name.
    async fn holder(&self, namespace: &str, name: &str, uid: Option<&str>) -> anyhow::Result<Option<Holder>> {
        let api = Api::<Pod>::namespaced(self.client.clone(), namespace);
        let found = tried(async || api.get_metadata_opt(name).await).await?;
        let Some(metadata) = found.map(|pod| pod.metadata) else {
            return Ok(None);
        };
        let known = metadata.uid.unwrap_or_default();
        if uid.is_some_and(|uid| uid != known) {
            return Ok(None);
        }
        let owners = metadata.owner_references.iter().flatten();
        Ok(Some(Holder {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: known,
            labels: metadata.labels.unwrap_or_default(),
            leaving: metadata.deletion_timestamp.is_some(),
            controlled: owners.into_iter().any(|owner| owner.controller == Some(true)),
            fixed: metadata.annotations.is_some_and(|all| all.contains_key(MIRROR)),
        }))
    }

    /// The GpuNode. The drain ends if the GPU is gone, or may get new pods.
    async fn node(&self) -> anyhow::Result<GpuNode> {
        self.node_of(true).await
    }

    async fn node_of(&self, must_be_cordoned: bool) -> anyhow::Result<GpuNode> {
        let Target { node, uuid, .. } = &self.target;
        let api = Api::<GpuNode>::all(self.client.clone());
        let found = tried(async || api.get_opt(node).await).await?;
        let found = found.with_context(|| format!("the GpuNode {node} is gone"))?;
        if !found.spec.machine.gpus().iter().any(|gpu| gpu.uuid.as_ref() == Some(uuid)) {
            return Err(anyhow!("{node} has no GPU {uuid} any more"));
        }
        if must_be_cordoned && Cordons::of(found.metadata.annotations.as_ref()).get(uuid).is_none() {
            return Err(anyhow!("{} was uncordoned meanwhile, and may get new pods", self.target));
        }
        Ok(found)
    }

    /// The budgets of the namespaces of the groups.
    async fn budgets(&self, groups: &[Group]) -> anyhow::Result<Vec<Budget>> {
        let pods = groups.iter().flat_map(|group| &group.pods);
        let spaces: BTreeSet<&String> = pods.map(|pod| &pod.namespace).collect();
        let mut all = Vec::new();
        for space in spaces {
            let api = Api::<PodDisruptionBudget>::namespaced(self.client.clone(), space);
            let found = list(api, "PodDisruptionBudgets").await?;
            all.extend(found.into_iter().map(|budget| Budget {
                namespace: space.clone(),
                name: budget.metadata.name.unwrap_or_default(),
                selector: budget.spec.and_then(|spec| spec.selector?.try_into().ok()),
                allowed: budget.status.map_or(0, |status| status.disruptions_allowed),
            }));
        }
        Ok(all)
    }

    /// Evicts a pod with its own grace period, or checks whether it could be evicted now.
    async fn evict(&self, pod: &Holder, dry_run: bool) -> anyhow::Result<Evicted> {
        let preconditions = Preconditions { uid: Some(pod.uid.clone()), resource_version: None };
        let delete = DeleteParams { dry_run, preconditions: Some(preconditions), ..DeleteParams::default() };
        let params = EvictParams { delete_options: Some(delete), ..EvictParams::default() };
        let api = Api::<Pod>::namespaced(self.client.clone(), &pod.namespace);
        let evicted = tried(async || match api.evict(&pod.name, &params).await {
            Ok(_) => Ok(Evicted::Done),
            Err(kube::Error::Api(status)) if status.code == 429 => {
                let causes = status.details.iter().flat_map(|details| &details.causes);
                let causes: Vec<&str> = causes.map(|cause| cause.message.as_str()).collect();
                Ok(Evicted::Blocked(format!("{} {}", status.message, causes.join("; ")).trim().to_owned()))
            }
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(Evicted::Gone),
            Err(error) => Err(error),
        });
        evicted.await.with_context(|| format!("{pod} cannot be evicted"))
    }

    /// Prints a line of progress, unless it is the last one.
    fn report(&mut self, line: String) -> anyhow::Result<()> {
        if self.last_line != line {
            print(&Visible::new(&format!("{line}\n")))?;
            self.last_line = line;
        }
        Ok(())
    }

    /// What a drain that ends early leaves behind.
    fn left(&self) -> String {
        let evicted = match self.evicted.is_empty() {
            true => "nothing was evicted".to_owned(),
            false => format!("evicted: {}", some(&self.evicted.iter().cloned().collect::<Vec<_>>())),
        };
        match self.options.dry_run {
            true => evicted,
            false => format!("{evicted}; nothing more is evicted, and the GPU stays as it is"),
        }
    }
}

/// The result of an eviction.
#[derive(Debug, PartialEq, Eq)]
enum Evicted {
    Done,
    /// It was gone, or another pod has its name.
    Gone,
    /// A disruption budget does not allow it now.
    Blocked(String),
}

/// Why a group cannot go as a whole now: the first budget that covers more of its pods than it allows to be disrupted.
fn blocked(group: &Group, budgets: &[Budget]) -> Option<String> {
    budgets.iter().find_map(|budget| {
        let covers = |pod: &&Holder| {
            let selector = budget.selector.as_ref();
            pod.namespace == budget.namespace
                && selector.is_some_and(|selector| selector.matches(&pod.labels))
        };
        let covered = group.pods.iter().filter(|pod| !pod.leaving).filter(covers).count();
        let allowed = usize::try_from(budget.allowed).unwrap_or(0);
        (covered > allowed).then(|| {
            format!(
                "the disruption budget {}/{} allows {allowed} of {covered} disruptions now",
                budget.namespace, budget.name
            )
        })
    })
}

/// Refuses pods that an eviction would not move, before any is evicted.
fn refused(groups: &[Group], force: bool) -> anyhow::Result<()> {
    let pods = || groups.iter().flat_map(|group| &group.pods).filter(|pod| !pod.leaving);
    let fixed: Vec<String> = pods().filter(|pod| pod.fixed).map(ToString::to_string).collect();
    if !fixed.is_empty() {
        return Err(anyhow!(
            "{} comes from a file on its node, and kubelet starts it again: remove the file",
            some(&fixed)
        ));
    }
    let alone: Vec<String> = pods().filter(|pod| !pod.controlled).map(ToString::to_string).collect();
    if !alone.is_empty() && !force {
        return Err(anyhow!("no controller replaces {}: add --force to evict it nevertheless", some(&alone)));
    }
    Ok(())
}

/// Sends a request, again while the API server does not respond.
async fn tried<T>(request: impl AsyncFn() -> kube::Result<T>) -> anyhow::Result<T> {
    let mut failures = 0;
    loop {
        let answer = tokio::time::timeout(TIMEOUT, request()).await;
        let error = match answer {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(kube::Error::Api(status))) if status.code == 403 => {
                return Err(anyhow!("{}; the ClusterRole gantry-operator has the right", status.message));
            }
            Ok(Err(kube::Error::Api(status))) if status.code < 500 && status.code != 429 => {
                return Err(anyhow!("{}", status.message));
            }
            Ok(Err(error)) => chain(&error),
            Err(_) => format!("no response within {} s", TIMEOUT.as_secs()),
        };
        failures += 1;
        if failures >= FAILURES {
            return Err(anyhow!("the API server does not respond: {error}"));
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// The first names, and how many more.
fn some(names: &[String]) -> String {
    match names.len() {
        count if count > NAMED => format!("{} and {} more", names[..NAMED].join(", "), count - NAMED),
        _ => names.join(", "),
    }
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl std::fmt::Display for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let pods: Vec<String> = self.pods.iter().map(ToString::to_string).collect();
        match &self.gang {
            Some(gang) => write!(f, "gang {gang} ({})", some(&pods)),
            None => write!(f, "pod {}", some(&pods)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pod(name: &str, app: &str) -> Holder {
        Holder {
            namespace: "research".to_owned(),
            name: name.to_owned(),
            uid: name.to_owned(),
            labels: [("app".to_owned(), app.to_owned())].into(),
            leaving: false,
            controlled: true,
            fixed: false,
        }
    }

    fn budget(app: &str, allowed: i32) -> Budget {
        let selector = Selector::from_iter([("app".to_owned(), app.to_owned())]);
        let (namespace, name) = ("research".to_owned(), format!("{app}-budget"));
        Budget { namespace, name, selector: Some(selector), allowed }
    }

    fn gang(pods: Vec<Holder>) -> Group {
        Group { gang: Some("research/train".to_owned()), pods }
    }

    #[test]
    fn gang_waits_until_its_budget_allows_all_of_it() {
        let group = gang(vec![pod("a", "train"), pod("b", "train"), pod("c", "other")]);
        let why = |allowed| blocked(&group, &[budget("train", allowed), budget("eval", 0)]);
        assert_eq!(
            why(1).as_deref(),
            Some("the disruption budget research/train-budget allows 1 of 2 disruptions now")
        );
        assert_eq!(why(2), None);
        // Pods that end already need no budget.
        let mut group = group.clone();
        group.pods[0].leaving = true;
        assert_eq!(blocked(&group, &[budget("train", 1)]), None);
        let elsewhere = Budget { namespace: "default".to_owned(), ..budget("train", 0) };
        assert_eq!(blocked(&group, &[elsewhere]), None);
    }

    #[test]
    fn pods_that_eviction_does_not_move_are_refused() {
        let alone = Holder { controlled: false, ..pod("a", "x") };
        let fixed = Holder { fixed: true, ..pod("b", "x") };
        let text =
            |pods: Vec<Holder>, force| refused(&[gang(pods)], force).map_err(|error| error.to_string());
        assert_eq!(
            text(vec![alone.clone(), pod("c", "x")], false),
            Err("no controller replaces research/a: add --force to evict it nevertheless".to_owned())
        );
        assert_eq!(text(vec![alone.clone()], true), Ok(()));
        assert!(text(vec![fixed], true).unwrap_err().contains("remove the file"));
        assert_eq!(text(vec![Holder { leaving: true, ..alone }], false), Ok(()));
    }

    proptest! {
        /// A group is evicted exactly if every budget allows all of its pods that it covers.
        #[test]
        fn group_goes_if_every_budget_allows_it(
            apps in proptest::collection::vec((0..3usize, any::<bool>()), 0..6),
            allowed in proptest::collection::vec(-1..6i32, 3),
        ) {
            let names = ["x", "y", "z"];
            let pods = apps.iter().enumerate().map(|(at, (app, leaving))| {
                Holder { leaving: *leaving, ..pod(&at.to_string(), names[*app]) }
            });
            let group = gang(pods.collect());
            let budgets: Vec<Budget> =
                names.iter().zip(&allowed).map(|(app, allowed)| budget(app, *allowed)).collect();
            let fits = allowed.iter().enumerate().all(|(app, allowed)| {
                let wanted = apps.iter().filter(|(of, leaving)| *of == app && !leaving).count();
                i32::try_from(wanted).unwrap() <= (*allowed).max(0)
            });
            prop_assert_eq!(blocked(&group, &budgets).is_none(), fits);
        }
    }
}
