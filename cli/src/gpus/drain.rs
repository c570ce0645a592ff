//! `gantry drain gpu`: cordons a GPU and evicts what holds it, until nothing does. Each pod is evicted by its UID; a gang
//! goes as a whole, once disruption budgets allow all of its pods.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use gantry_api::{Cordon, Cordons, GpuNode};
use gantry_extender::eviction::{
    self, Budget, EvictionOutcome, Group, Holder, blocked, refused, reported_holders, some,
};
use gantry_extender::offline;
use gantry_extender::watch::Extent;
use gantry_runtime::chain;
use k8s_openapi::jiff::Timestamp;
use kube::{Api, Client};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::request::tried;
use super::target::Target;
use super::{DrainArgs, DrainCommand, DrainOptions, cordon};
use crate::runtime::{BadInput, print};
use crate::visible::Visible;

/// Pause between two looks at the pods.
const PAUSE: Duration = Duration::from_secs(1);
/// Timeout for reading the cluster.
const LIMIT: Duration = Duration::from_secs(30);

/// Runs `gantry drain`.
///
/// # Errors
/// The cluster has no such GPU, or the GPU is not empty in time.
pub(crate) async fn drain(args: DrainArgs, shutdown: CancellationToken) -> anyhow::Result<()> {
    let DrainCommand::Gpu(options) = args.what;
    let words = std::slice::from_ref(&options.one.gpu);
    let (client, _, found) = cordon::read(&options.one.cluster, words).await?;
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
                self.refused(&groups)?;
            }
            let leaving = reported_holders(&node, &self.target.uuid);
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
                    if let EvictionOutcome::Blocked(why) = self.evict(pod, true).await? {
                        line.push_str(&format!("; not yet: {pod}: {why}"));
                        break;
                    }
                }
            }
            self.report(line)?;
        }
        self.refused(&groups)
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
                    EvictionOutcome::Done => {
                        if self.evicted.insert(pod.to_string()) {
                            let of = group
                                .gang
                                .as_ref()
                                .map_or_else(String::new, |gang| format!(" of gang {gang}"));
                            self.report(format!("evicted {pod}{of}"))?;
                        }
                        going.push(pod.to_string());
                    }
                    EvictionOutcome::Gone => {}
                    EvictionOutcome::Blocked(why) => waits.push(format!("{pod}: {why}")),
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
        let settings = self.options.one.system.settings(self.client.clone()).await;
        let terms = settings.terms().map_err(BadInput)?;
        let seen = offline::look(self.client.clone(), terms, Extent::AtOnce, LIMIT).await?;
        let units = eviction::units(node, &self.target.uuid);
        let known = seen.store.read(|store| store.holder_groups(&self.target.node, &units));
        let reported = reported_holders(node, &self.target.uuid);
        tried(async || eviction::groups(&self.client, &known, &reported).await).await
    }

    /// Reads the pods again, and forgets those that are gone.
    async fn refresh(&self, groups: &mut Vec<Group>) -> anyhow::Result<()> {
        for group in groups.iter_mut() {
            let mut pods = Vec::new();
            for pod in &group.pods {
                let Holder { namespace, name, uid, .. } = pod;
                pods.extend(
                    tried(async || eviction::holder(&self.client, namespace, name, Some(uid)).await).await?,
                );
            }
            group.pods = pods;
        }
        groups.retain(|group| !group.pods.is_empty());
        Ok(())
    }

    /// The GpuNode. The drain ends if the GPU is gone, or may get new pods.
    async fn node(&mut self) -> anyhow::Result<GpuNode> {
        self.node_of(true).await
    }

    async fn node_of(&mut self, must_be_cordoned: bool) -> anyhow::Result<GpuNode> {
        let Target { node, uuid, .. } = &self.target;
        let api = Api::<GpuNode>::all(self.client.clone());
        let found = tried(async || api.get_opt(node).await).await?;
        let found = found.with_context(|| format!("the GpuNode {node} is gone"))?;
        let is_cordoned = Cordons::of(found.metadata.annotations.as_ref()).get(uuid).is_some();
        self.target = self.target.located(&found)?;
        if must_be_cordoned && !is_cordoned {
            return Err(anyhow!("{} was uncordoned meanwhile, and may get new pods", self.target));
        }
        Ok(found)
    }

    /// Refuses pods that an eviction would not move, before any is evicted.
    fn refused(&self, groups: &[Group]) -> anyhow::Result<()> {
        refused(groups, self.options.force).map_err(|refusal| {
            let hint = if refusal.force_helps { ": add --force to evict it nevertheless" } else { "" };
            anyhow!("{}{hint}", refusal.text)
        })
    }

    async fn budgets(&self, groups: &[Group]) -> anyhow::Result<Vec<Budget>> {
        tried(async || eviction::budgets(&self.client, groups).await).await
    }

    async fn evict(&self, pod: &Holder, dry_run: bool) -> anyhow::Result<EvictionOutcome> {
        let evicted = tried(async || eviction::evict(&self.client, pod, dry_run).await).await;
        evicted.with_context(|| format!("{pod} cannot be evicted"))
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
