//! Sources as a running daemon sees them: real files, swapped the way kubelet and people swap them.

use std::path::Path;
use std::time::Duration;

use super::*;
use crate::config::MigStrategy;

/// What is awaited comes in a moment; this is for a machine under load.
const SOON: Duration = Duration::from_secs(20);

struct Followed {
    configs: watch::Receiver<Arc<Config>>,
    reports: watch::Receiver<Report>,
    _stop: tokio_util::sync::DropGuard,
}

impl Followed {
    async fn of(place: Place) -> Result<Self, SourceError> {
        let (sender, reports) = watch::channel(Report::default());
        let stop = CancellationToken::new();
        let source = Source {
            place,
            layers: Vec::new(),
            strictness: Strictness::Strict,
            gpu_resource: None,
        };
        let configs = follow(source, sender, &TaskTracker::new(), stop.clone()).await?;
        Ok(Self {
            configs: configs.unwrap(),
            reports,
            _stop: stop.drop_guard(),
        })
    }

    async fn config(&mut self, wanted: MigStrategy) {
        let is = |config: &Arc<Config>| config.mig_strategy == wanted;
        tokio::time::timeout(SOON, self.configs.wait_for(is))
            .await
            .unwrap()
            .unwrap();
    }

    async fn report(&mut self, is: impl Fn(&Report) -> bool) -> Report {
        let report = tokio::time::timeout(SOON, self.reports.wait_for(is))
            .await
            .unwrap();
        report.unwrap().clone()
    }
}

fn write(path: &Path, strategy: &str) {
    std::fs::write(path, format!("flags: {{migStrategy: {strategy}}}\n")).unwrap();
}

#[tokio::test]
async fn flags_alone_make_a_configuration_that_stays() {
    let followed = Followed::of(Place::Flags).await.unwrap();
    assert_eq!(**followed.configs.borrow(), Config::default());
    assert_eq!(followed.reports.borrow().loads, 1);
    assert!(followed.configs.has_changed().is_ok(), "the sender is gone");
}

#[tokio::test]
async fn a_file_written_over_is_read_again_and_a_bad_one_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.yaml");
    write(&path, "single");
    let mut followed = Followed::of(Place::File(path.clone())).await.unwrap();
    followed.config(MigStrategy::Single).await;
    write(&path, "mixed");
    followed.config(MigStrategy::Mixed).await;

    write(&path, "mixd");
    let report = followed.report(|report| report.problem.is_some()).await;
    assert!(report.problem.unwrap().contains("did you mean \"mixed\"?"));
    assert_eq!(followed.configs.borrow().mig_strategy, MigStrategy::Mixed);
    std::fs::remove_file(&path).unwrap();
    followed
        .report(|report| {
            report
                .problem
                .as_ref()
                .is_some_and(|text| text.contains("No such file"))
        })
        .await;
    assert_eq!(followed.configs.borrow().mig_strategy, MigStrategy::Mixed);

    // Mended to what is in effect: the problem goes, nothing is put into effect anew.
    write(&path, "mixed");
    let report = followed.report(|report| report.problem.is_none()).await;
    assert_eq!((report.loads, report.failures), (2, 2));
}

#[tokio::test]
async fn a_mounted_config_map_that_is_swapped_is_seen() {
    let mount = tempfile::tempdir().unwrap();
    let at = |name: &str| mount.path().join(name);
    let version = |name: &str, strategy: &str| {
        std::fs::create_dir(at(name)).unwrap();
        write(&at(name).join("config.yaml"), strategy);
    };
    version("..1", "single");
    std::os::unix::fs::symlink("..1", at("..data")).unwrap();
    std::os::unix::fs::symlink("..data/config.yaml", at("config.yaml")).unwrap();
    let mut followed = Followed::of(Place::File(at("config.yaml"))).await.unwrap();
    for (name, strategy, wanted) in [
        ("..2", "mixed", MigStrategy::Mixed),
        ("..3", "none", MigStrategy::None),
    ] {
        version(name, strategy);
        std::os::unix::fs::symlink(name, at("..data_tmp")).unwrap();
        std::fs::rename(at("..data_tmp"), at("..data")).unwrap();
        followed.config(wanted).await;
    }
}

#[tokio::test]
async fn the_link_that_nvidias_config_manager_turns_is_followed() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for part in ["available", "config"] {
        std::fs::create_dir(at(part)).unwrap();
    }
    write(&at("available/a"), "single");
    write(&at("available/b"), "mixed");
    let link = at("config/config.yaml");
    std::os::unix::fs::symlink(at("available/a"), &link).unwrap();
    let mut followed = Followed::of(Place::File(link.clone())).await.unwrap();
    std::fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink(at("available/b"), &link).unwrap();
    followed.config(MigStrategy::Mixed).await;
    // Its "empty" configuration.
    std::fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink("/dev/null", &link).unwrap();
    followed.config(MigStrategy::None).await;
}

#[tokio::test]
async fn what_is_wrong_at_the_start_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.yaml");
    let missing = Followed::of(Place::File(path.clone()))
        .await
        .map(|_| ())
        .unwrap_err();
    assert!(
        missing
            .to_string()
            .contains("config.yaml: cannot be read: No such file"),
        "{missing}"
    );
    write(&path, "some");
    let wrong = Followed::of(Place::File(path)).await.map(|_| ()).unwrap_err();
    assert!(
        wrong.to_string().contains("allowed: none, single, mixed"),
        "{wrong}"
    );
}

#[tokio::test]
async fn a_hangup_ends_nothing() {
    let mut followed = Followed::of(Place::Flags).await.unwrap();
    // Without a handler this would end the test's own process.
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::HUP).unwrap();
    followed.config(MigStrategy::None).await;
}

#[tokio::test]
async fn a_file_that_has_no_end_is_not_read_to_its_end() {
    let endless = Followed::of(Place::File("/dev/zero".into()))
        .await
        .map(|_| ())
        .unwrap_err();
    assert_eq!(
        endless.to_string(),
        "/dev/zero: cannot be read: it is longer than 1048576 bytes"
    );
}
