//! The extender as one program: what its parts are, what they share, and how they end.

use std::convert::Infallible;
use std::sync::Arc;

use anyhow::Context;
use gantry_api::{ResourceName, names};
use gantry_runtime::http::Listen;
use gantry_runtime::{policies, supervise};
use kube::Client;
use tokio::net::TcpListener;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use crate::answers::http::Answers;
use crate::args::{Args, LeaseArgs, TlsArgs, WebhookArgs};
use crate::assigned::Assignments;
use crate::bind::Binder;
use crate::index::{Index, Store};
use crate::lease::Leadership;
use crate::metrics::Metrics;
use crate::object_memory::ObjectMemory;
use crate::page::Page;
use crate::published::PublishedSettings;
use crate::remediation::Remediation;
use crate::server::{Bodies, Listeners, Server};
use crate::service::Service;
use crate::slow_members::SlowMemberSettings;
use crate::tls::Tls;
use crate::watch::{ApiHealth, Extent, Watches};
use crate::watched::WatchedResources;
use crate::webhook::{Assignment, Webhook};
use crate::writers::Writers;
use crate::{announce, assigned, gang, lease, tls, watch};
use gantry_planner::decide::Options;
use gantry_planner::placement::{PlacementDefaults, check_cost_order};

/// A configured extender, not yet connected to anything.
#[derive(Debug)]
pub struct Daemon {
    args: Args,
    options: Options,
    watched: WatchedResources,
    tls: Option<Arc<Tls>>,
    webhook: Option<WebhookSettings>,
    /// A name that no other process has.
    run: String,
    election: Option<lease::Settings>,
    remediation: Option<Remediation>,
    slow_members: Option<SlowMemberSettings>,
}

/// What the webhook needs.
#[derive(Debug)]
struct WebhookSettings {
    tls: Arc<Tls>,
    scheduler: String,
}

/// Where requests are served that change nothing in the extender.
#[derive(Debug, Default)]
pub struct ReadOnlyListeners {
    /// The web page.
    pub page: Option<TcpListener>,
    /// The answers to `gantry explain`.
    pub explain: Option<TcpListener>,
    /// The mutating admission webhook.
    pub webhook: Option<TcpListener>,
}

impl Daemon {
    /// Reads all that the arguments name.
    ///
    /// # Errors
    /// Options that contradict each other; a file that cannot be read.
    pub fn new(args: Args) -> anyhow::Result<Self> {
        let defaults = PlacementDefaults::read(args.request_defaults.iter().map(String::as_str));
        let defaults = defaults.context("--request-default")?;
        check_cost_order(&args.model_cost_order)
            .map_err(|problem| anyhow::anyhow!("--model-cost-order: {problem}"))?;
        let watched = WatchedResources::new(read_resources(&args.resources)?);
        let run = run_id();
        let read_rules = |file| Remediation::read(file, &args.lease.lease_namespace);
        let after = args.gangs.slow_member_after;
        Ok(Self {
            options: options(&args),
            watched: watched.with_placement(defaults, args.model_cost_order.clone()),
            tls: tls(&args.tls)?,
            webhook: webhook(&args.webhook, &args.schedulers)?,
            election: election(&args, &run)?,
            remediation: args.remediation_rules.as_deref().map(read_rules).transpose()?,
            slow_members: (!after.is_zero()).then(|| SlowMemberSettings { clocks: Arc::default(), after }),
            run,
            args,
        })
    }

    /// Runs until `shutdown`, for the cluster of this client.
    ///
    /// # Errors
    /// A task that only ends at shutdown has ended before.
    pub async fn run<L: Listen>(
        self,
        client: Client,
        listeners: Listeners<L>,
        read_only: ReadOnlyListeners,
        shutdown: CancellationToken,
    ) -> anyhow::Result<()> {
        let Self { args, options, watched, tls, webhook, run, election, remediation, slow_members } = self;
        let address = listeners.all.address()?;
        tracing::info!(%address, resources = ?watched.named(), ?options, "gantry extender serves");
        if tls.as_ref().is_none_or(|tls| !tls.wants_clients()) && !address.ip().is_loopback() {
            tracing::warn!(%address, "every client that reaches this address can bind pods; set --tls-cert, --tls-key and --client-ca");
        }

        let leadership = Arc::new(match &election {
            Some(_) => Leadership::follower(),
            None => Leadership::always(),
        });
        let memory = ObjectMemory::of_mib(args.object_memory);
        let index = index(&args, options, &watched, run.clone())?;
        let store = Arc::new(Store::new(index).with_memory(memory));
        let (assignments, assigned) = Assignments::new();
        let binder = Binder::new(client.clone(), Arc::clone(&store), watched.clone(), args.bind_timeout);
        let mig_drains = Arc::default();
        let writers = Writers {
            client: client.clone(),
            binder: binder.led(Arc::clone(&leadership)).publishing(assignments),
            store: Arc::clone(&store),
            objects: Arc::default(),
            metrics: Arc::new(Metrics::new()),
            gates: args.gangs.gates,
            remediation: remediation.clone(),
            slow_members: slow_members.clone(),
            mig_drains: Arc::clone(&mig_drains),
            announces: announces(&args.lease, address.port()),
        };
        let health = ApiHealth::new();
        let watches = Watches {
            watched: watched.clone(),
            store: Arc::clone(&store),
            health: Arc::clone(&health),
            objects: Arc::clone(&writers.objects),
            leadership: Arc::clone(&leadership),
            metrics: Arc::clone(&writers.metrics),
            gpu_health: remediation.map(|remediation| remediation.health),
            gpu_clocks: slow_members.map(|settings| settings.clocks),
            mig_drains,
            extent: Extent::Paged,
        };
        let watching = tokio::spawn(watch::run(client.clone(), watches, shutdown.clone()));
        let server = Server {
            service: Service {
                binder: writers.binder.clone(),
                store: Arc::clone(&store),
                watched: watched.clone(),
                metrics: Arc::clone(&writers.metrics),
            },
            health,
            leadership: Arc::clone(&leadership),
            tls,
            webhook_tls: webhook.as_ref().map(|webhook| Arc::clone(&webhook.tls)),
            bodies: Bodies::new(usize::try_from(args.body_limit)? * 1024 * 1024),
            stale_after: args.stale_after,
            drain: args.bind_timeout,
        };
        // The Lease is held until the last call is answered.
        let release = CancellationToken::new();
        let mut tasks = JoinSet::new();
        if let Some(listener) = read_only.explain {
            let answers = Answers {
                store: Arc::clone(&store),
                resources: args.resources.clone(),
                leadership: Arc::clone(&leadership),
                metrics: Arc::clone(&writers.metrics),
            };
            tasks.spawn(answers.run(listener, shutdown.clone()));
        }
        if let Some(listener) = read_only.page {
            let page = Page {
                store: Arc::clone(&store),
                client: client.clone(),
                health: Arc::clone(&server.health),
                leadership: Arc::clone(&leadership),
                metrics: Arc::clone(&writers.metrics),
                levels: args.gangs.fabric.clone(),
                stale_after: args.stale_after,
                hosts: args.page_hosts.clone(),
                run,
            };
            let address = listener.local_addr()?;
            tracing::info!(%address, "the web page is served");
            if !address.ip().is_loopback() {
                tracing::warn!(%address, "every client that reaches the web page sees nodes, pods and gangs; docs/security.md");
            }
            tasks.spawn(page.run(listener, shutdown.clone()));
        }
        if let Some(settings) = election {
            let state = lease::run(client.clone(), settings, Arc::clone(&leadership), release.clone());
            tasks.spawn(state);
        }
        for tls in [&server.tls, &server.webhook_tls].into_iter().flatten() {
            let (tls, shutdown) = (Arc::clone(tls), shutdown.clone());
            tasks.spawn(async move { tls.follow(shutdown).await });
        }
        if let Some((listener, WebhookSettings { tls, scheduler })) = read_only.webhook.zip(webhook) {
            tracing::info!(address = %listener.local_addr()?, scheduler, "the webhook is served");
            let assignment = Assignment { watched, scheduler };
            let webhook = Webhook { assignment, tls, metrics: Arc::clone(&writers.metrics) };
            tasks.spawn(webhook.run(listener, shutdown.clone()));
        }
        look_around(&mut tasks, &client, &store, &shutdown);
        // Until the last bind is answered.
        let metrics = Arc::clone(&writers.metrics);
        tasks.spawn(assigned::run(client.clone(), assigned, metrics, release.clone()));
        tasks.spawn(check_policies(client, Arc::clone(&writers.metrics), shutdown.clone()));
        tasks.spawn(writers.work(leadership, release.clone()));
        let serving = together(server.run(listeners, shutdown.clone()), watching, &shutdown);
        supervise::serve_with_tasks(serving, tasks, &shutdown, &release).await
    }
}

fn options(args: &Args) -> Options {
    Options {
        foreign: args.foreign_nodes,
        policy: args.policy,
        patience: args.gangs.gang_patience,
        drain: args.gangs.gang_drain,
        nominate: args.gangs.nominate,
    }
}

/// What will be known of the cluster: nothing yet. `run` distinguishes this process's decisions from those of others.
fn index(args: &Args, options: Options, watched: &WatchedResources, run: String) -> anyhow::Result<Index> {
    let mut index = Index::new(options, watched, run.clone());
    index.set_fabric(args.gangs.fabric.clone());
    index.set_schedulers(args.schedulers.iter().map(|name| name.as_str().into()));
    index.set_gangs(gantry_gang::protocol::Settings {
        identity: run.into(),
        gates: args.gangs.gates,
        arrival: args.gangs.gang_arrival,
        ceilings: args.gangs.ceilings()?,
        restart_hold: args.gangs.gang_restart_hold,
        hold: args.gangs.gang_hold,
        levels: args.gangs.fabric.clone(),
        ..Default::default()
    });
    Ok(index)
}

/// Starts what plans, and what reads of the cluster only what is wanted of it: budgets, volumes and owners.
fn look_around(tasks: &mut JoinSet<()>, client: &Client, store: &Arc<Store>, shutdown: &CancellationToken) {
    let planning = (Arc::clone(store), shutdown.clone());
    tasks.spawn(async move { planning.0.plan(planning.1).await });
    tasks.spawn(gang::budgets::run(client.clone(), Arc::clone(store), shutdown.clone()));
    tasks.spawn(gang::volumes::run(client.clone(), Arc::clone(store), shutdown.clone()));
    let (wanted, seen) = (Arc::clone(store), Arc::clone(store));
    let memory = Arc::clone(store.memory());
    tasks.spawn(gang::owners::run(
        client.clone(),
        move || wanted.read(Index::watched_owners),
        move |owner, facts| seen.update(|index| index.owner_seen(owner, facts)),
        memory,
        shutdown.clone(),
    ));
}

async fn check_policies(client: Client, metrics: Arc<Metrics>, shutdown: CancellationToken) {
    let following =
        policies::follow(client, &names::EXTENDER_POLICIES, move |count| metrics.missing_policies(count));
    let _: Option<Infallible> = shutdown.run_until_cancelled(following).await;
}

fn tls(args: &TlsArgs) -> anyhow::Result<Option<Arc<Tls>>> {
    let (Some(cert), Some(key)) = (&args.tls_cert, &args.tls_key) else {
        return Ok(None);
    };
    let files = tls::Files {
        options: tls::FileOptions::VERBS,
        cert: cert.clone(),
        key: key.clone(),
        client_ca: args.client_ca.clone(),
        client_name: args.client_name.clone(),
    };
    Ok(Some(Arc::new(Tls::load(files)?)))
}

/// What the webhook needs, if it is served.
fn webhook(args: &WebhookArgs, schedulers: &[String]) -> anyhow::Result<Option<WebhookSettings>> {
    let WebhookArgs { webhook_listen: Some(_), webhook_cert: Some(cert), webhook_key: Some(key) } = args
    else {
        return Ok(None);
    };
    let scheduler = schedulers.iter().find(|name| *name != names::DEFAULT_SCHEDULER);
    let scheduler = scheduler.with_context(|| {
        format!(
            "--webhook-listen: the webhook sets schedulerName of pods, so --scheduler-name must have a name other than {}",
            names::DEFAULT_SCHEDULER
        )
    })?;
    let files = tls::Files {
        options: tls::FileOptions::WEBHOOK,
        cert: cert.clone(),
        key: key.clone(),
        client_ca: None,
        client_name: String::new(),
    };
    Ok(Some(WebhookSettings { tls: Arc::new(Tls::load(files)?), scheduler: scheduler.clone() }))
}

/// A name that no other process has, be it started on the same machine in the same moment: two that share one would
/// both take the Lease for their own.
fn run_id() -> String {
    format!("{:016x}", rand::random::<u64>())
}

/// For which Lease this process stands, if it does. `run` distinguishes it from the process before it on the same machine.
fn election(args: &Args, run: &str) -> anyhow::Result<Option<lease::Settings>> {
    let published = PublishedSettings::of(args)?.to_annotation()?;
    let args = &args.lease;
    if !args.leader_elect {
        return Ok(None);
    }
    let (duration, deadline) = (args.lease_duration, args.lease_renew_deadline);
    anyhow::ensure!(
        deadline < duration,
        "--lease-renew-deadline {} must be less than --lease-duration {}",
        deadline.as_secs(),
        duration.as_secs()
    );
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    Ok(Some(lease::Settings {
        namespace: args.lease_namespace.clone(),
        name: args.lease_name.clone(),
        identity: format!("{}_{run}", host.trim()),
        duration,
        renew_deadline: deadline,
        published,
    }))
}

/// Which Service this process leads to itself while it leads, if any.
fn announces(args: &LeaseArgs, port: u16) -> Option<announce::Settings> {
    let (service, address) = args.leader_service.as_ref().zip(args.leader_address)?;
    Some(announce::Settings {
        namespace: args.lease_namespace.clone(),
        service: service.clone(),
        address,
        port,
    })
}

/// Serves as long as the watches run. Neither is of use without the other: answers would grow old without end.
async fn together(
    serving: impl Future<Output = ()>,
    mut watching: JoinHandle<()>,
    shutdown: &CancellationToken,
) -> anyhow::Result<()> {
    let mut serving = std::pin::pin!(serving);
    let ended = tokio::select! {
        () = &mut serving => {
            shutdown.cancel();
            return watching.await.context("the watches panicked");
        }
        ended = &mut watching => ended,
    };
    let in_order = shutdown.is_cancelled();
    shutdown.cancel();
    serving.await;
    ended.context("the watches panicked")?;
    anyhow::ensure!(in_order, "the watches ended by themselves");
    Ok(())
}

fn read_resources(written: &[String]) -> anyhow::Result<Vec<ResourceName>> {
    let mut resources: Vec<ResourceName> = Vec::new();
    for name in written.iter().map(|name| name.trim()) {
        let extended =
            name.split_once('/').is_some_and(|(domain, rest)| !domain.is_empty() && !rest.is_empty());
        anyhow::ensure!(extended, "--resource {name:?}: write a domain and a name, such as nvidia.com/gpu");
        if !resources.iter().any(|known| known.as_str() == name) {
            resources.push(name.into());
        }
    }
    Ok(resources)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_that_start_in_one_moment_have_names_of_their_own() {
        let names: std::collections::HashSet<String> = (0..1000).map(|_| run_id()).collect();
        assert_eq!(names.len(), 1000);
    }

    #[test]
    fn webhook_needs_a_scheduler_of_its_own() {
        let authority = crate::tls::tests::Authority::new();
        authority.issue("webhook");
        let args = |listen: Option<&str>| WebhookArgs {
            webhook_listen: listen.map(|address| address.parse().unwrap()),
            webhook_cert: Some(authority.path("webhook.crt")),
            webhook_key: Some(authority.path("webhook.key")),
        };
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let settings = webhook(&args(Some("[::]:9443")), &names(&["default-scheduler", "gantry", "b"]));
        assert_eq!(settings.unwrap().unwrap().scheduler, "gantry");
        let refused = webhook(&args(Some("[::]:9443")), &names(&["default-scheduler"])).unwrap_err();
        let expected = "--webhook-listen: the webhook sets schedulerName of pods, so --scheduler-name must have a name other than default-scheduler";
        assert_eq!(refused.to_string(), expected);
        assert!(webhook(&args(None), &names(&["default-scheduler"])).unwrap().is_none());
    }

    #[tokio::test]
    async fn the_extender_ends_when_its_watches_do_and_says_so() {
        let ends: [(JoinHandle<()>, &str); 2] = [
            (tokio::spawn(async { panic!("a bug") }), "the watches panicked"),
            (tokio::spawn(async {}), "the watches ended by themselves"),
        ];
        for (watching, words) in ends {
            let shutdown = CancellationToken::new();
            let error = together(shutdown.cancelled(), watching, &shutdown).await.unwrap_err();
            assert_eq!(error.to_string(), words);
            assert!(shutdown.is_cancelled());
        }
        let shutdown = CancellationToken::new();
        let watching = tokio::spawn(shutdown.clone().cancelled_owned());
        shutdown.cancel();
        together(shutdown.cancelled(), watching, &shutdown).await.unwrap();
    }
}
