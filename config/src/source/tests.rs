//! Sources of a running daemon: real files, replaced as kubelet and editors do it.

use std::path::Path;
use std::time::Duration;

use super::log::Log;
use super::*;
use crate::MigStrategy;

/// A long limit for a machine under load; events come in a moment.
const SOON: Duration = Duration::from_secs(20);

struct Followed {
    configs: watch::Receiver<Arc<Config>>,
    reports: watch::Receiver<Report>,
    _stop: tokio_util::sync::DropGuard,
}

impl Followed {
    async fn of(place: ConfigLocation) -> Result<Self, SourceError> {
        Self::on(|_| Ok(()), place).await
    }

    /// On a host that `fits` describes.
    async fn on(
        fits: impl Fn(&Config) -> Result<(), String> + Send + Sync + 'static,
        place: ConfigLocation,
    ) -> Result<Self, SourceError> {
        let (sender, reports) = watch::channel(Report::default());
        let stop = CancellationToken::new();
        let source = Source { place, layers: Vec::new(), strictness: Strictness::Strict, gpu_resource: None };
        let configs = follow(source, fits, sender, &TaskTracker::new(), stop.clone()).await?;
        Ok(Self { configs: configs.unwrap(), reports, _stop: stop.drop_guard() })
    }

    async fn config(&mut self, wanted: MigStrategy) {
        let is = |config: &Arc<Config>| config.mig_strategy == wanted;
        tokio::time::timeout(SOON, self.configs.wait_for(is)).await.unwrap().unwrap();
    }

    async fn report(&mut self, is: impl Fn(&Report) -> bool) -> Report {
        let report = tokio::time::timeout(SOON, self.reports.wait_for(is)).await.unwrap();
        report.unwrap().clone()
    }
}

fn write(path: &Path, strategy: &str) {
    std::fs::write(path, format!("flags: {{migStrategy: {strategy}}}\n")).unwrap();
}

/// A text without the path of the test's folder.
fn without(folder: &tempfile::TempDir, text: &str) -> String {
    text.replace(folder.path().to_str().unwrap(), "")
}

#[tokio::test]
async fn flags_alone_give_a_constant_config() {
    let followed = Followed::of(ConfigLocation::Flags).await.unwrap();
    assert_eq!(**followed.configs.borrow(), Config::default());
    assert_eq!(followed.reports.borrow().loads, 1);
    assert!(followed.configs.has_changed().is_ok(), "the sender is gone");
}

#[tokio::test]
async fn overwritten_file_is_reread_and_bad_one_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.yaml");
    write(&path, "single");
    let mut followed = Followed::of(ConfigLocation::File(path.clone())).await.unwrap();
    followed.config(MigStrategy::Single).await;
    write(&path, "mixed");
    followed.config(MigStrategy::Mixed).await;

    write(&path, "mixd");
    let report = followed.report(|report| report.problem.is_some()).await;
    insta::assert_snapshot!(without(&folder, &report.problem.unwrap()), @r#"/config.yaml: line 1: flags.migStrategy: "mixd" is not allowed; allowed: none, single, mixed; did you mean "mixed"?"#);
    assert_eq!(followed.configs.borrow().mig_strategy, MigStrategy::Mixed);
    std::fs::remove_file(&path).unwrap();
    let report = followed.report(|report| report.failures == 2).await;
    insta::assert_snapshot!(without(&folder, &report.problem.unwrap()), @"/config.yaml: No such file or directory (os error 2)");
    assert_eq!(followed.configs.borrow().mig_strategy, MigStrategy::Mixed);

    // Corrected to the configuration in effect: the problem is cleared, and no configuration is published.
    write(&path, "mixed");
    let report = followed.report(|report| report.problem.is_none()).await;
    assert_eq!((report.loads, report.failures), (2, 2));
}

#[tokio::test]
async fn effective_config_is_logged_at_start_and_change() {
    let log = Log::default();
    let _here = log.listen();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.yaml");
    write(&path, "single");
    let mut followed = Followed::of(ConfigLocation::File(path.clone())).await.unwrap();
    followed.config(MigStrategy::Single).await;
    let reported = |strategy: MigStrategy| {
        let config = Config { mig_strategy: strategy, ..Config::default() };
        log.of(&format!("config={} ", config.to_json()))
    };
    assert_eq!((reported(MigStrategy::Single), reported(MigStrategy::Mixed)), (1, 0));
    write(&path, "mixed");
    followed.config(MigStrategy::Mixed).await;
    followed.report(|report| report.loads == 2).await;
    assert_eq!((reported(MigStrategy::Single), reported(MigStrategy::Mixed)), (1, 1));
}

#[tokio::test]
async fn swapped_config_map_mount_is_detected() {
    let mount = tempfile::tempdir().unwrap();
    let at = |name: &str| mount.path().join(name);
    let version = |name: &str, strategy: &str| {
        std::fs::create_dir(at(name)).unwrap();
        write(&at(name).join("config.yaml"), strategy);
    };
    version("..1", "single");
    std::os::unix::fs::symlink("..1", at("..data")).unwrap();
    std::os::unix::fs::symlink("..data/config.yaml", at("config.yaml")).unwrap();
    let mut followed = Followed::of(ConfigLocation::File(at("config.yaml"))).await.unwrap();
    for (name, strategy, wanted) in [("..2", "mixed", MigStrategy::Mixed), ("..3", "none", MigStrategy::None)]
    {
        version(name, strategy);
        std::os::unix::fs::symlink(name, at("..data_tmp")).unwrap();
        std::fs::rename(at("..data_tmp"), at("..data")).unwrap();
        followed.config(wanted).await;
    }
}

#[tokio::test]
async fn link_of_nvidias_config_manager_is_followed() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for part in ["available", "config"] {
        std::fs::create_dir(at(part)).unwrap();
    }
    write(&at("available/a"), "single");
    write(&at("available/b"), "mixed");
    let link = at("config/config.yaml");
    std::os::unix::fs::symlink(at("available/a"), &link).unwrap();
    let mut followed = Followed::of(ConfigLocation::File(link.clone())).await.unwrap();
    std::fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink(at("available/b"), &link).unwrap();
    followed.config(MigStrategy::Mixed).await;
    // The "empty" configuration of config-manager.
    std::fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink("/dev/null", &link).unwrap();
    followed.config(MigStrategy::None).await;
}

#[tokio::test]
async fn wrong_config_at_start_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.yaml");
    let missing = Followed::of(ConfigLocation::File(path.clone())).await.map(|_| ()).unwrap_err();
    assert!(matches!(&missing, SourceError::Unreadable { path: at, .. } if *at == path), "{missing}");
    write(&path, "some");
    let wrong = Followed::of(ConfigLocation::File(path)).await.map(|_| ()).unwrap_err();
    insta::assert_snapshot!(without(&folder, &wrong.to_string()), @r#"/config.yaml: line 1: flags.migStrategy: "some" is not allowed; allowed: none, single, mixed"#);
}

#[tokio::test]
async fn hangup_does_not_end_the_process() {
    let mut followed = Followed::of(ConfigLocation::Flags).await.unwrap();
    // Without a handler this would end the test process.
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::HUP).unwrap();
    followed.config(MigStrategy::None).await;
}

/// Why a followed file cannot be read.
async fn refusal(path: &Path) -> String {
    let reading = Followed::of(ConfigLocation::File(path.to_owned()));
    let error = tokio::time::timeout(SOON, reading).await.unwrap();
    error.map(|_| ()).unwrap_err().to_string()
}

#[tokio::test]
async fn too_long_file_is_not_read_to_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.yaml");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(1 << 40).unwrap();
    let refusal = refusal(&path).await;
    insta::assert_snapshot!(without(&folder, &refusal), @"/config.yaml: cannot be read: it is longer than 1048576 bytes");
}

// The deadline has a thread of its own, which a blocked read would not stop.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn non_regular_file_is_refused_without_blocking() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    let mode = rustix::fs::Mode::RWXU;
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let reading = tokio::spawn(async move { refusal(&pipe).await });
    let refused = tokio::time::timeout(SOON, reading).await.unwrap().unwrap();
    insta::assert_snapshot!(without(&folder, &refused), @"/pipe: cannot be read: it is a pipe (FIFO); a config file is a regular file, a link to one, or /dev/null for an empty one");
    insta::assert_snapshot!(refusal("/dev/zero".as_ref()).await, @"/dev/zero: cannot be read: it is a device; a config file is a regular file, a link to one, or /dev/null for an empty one");
    insta::assert_snapshot!(refusal("/dev".as_ref()).await, @"/dev: cannot be read: it is a folder; a config file is a regular file, a link to one, or /dev/null for an empty one");
}

#[tokio::test]
async fn file_that_becomes_a_pipe_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.yaml");
    write(&path, "single");
    let mut followed = Followed::of(ConfigLocation::File(path.clone())).await.unwrap();
    let pipe = folder.path().join("pipe");
    let mode = rustix::fs::Mode::RWXU;
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    std::fs::rename(&pipe, &path).unwrap();
    let report = followed.report(|report| report.problem.is_some()).await;
    insta::assert_snapshot!(without(&folder, &report.problem.unwrap()), @"/config.yaml: it is a pipe (FIFO); a config file is a regular file, a link to one, or /dev/null for an empty one");
    assert_eq!(followed.configs.borrow().mig_strategy, MigStrategy::Single);
}

#[test]
fn pipe_is_read_if_not_followed() {
    use std::io::Write;
    let (reader, mut writer) = std::io::pipe().unwrap();
    writer.write_all(b"flags: {migStrategy: mixed}").unwrap();
    drop(writer);
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&reader));
    let source = Source {
        place: ConfigLocation::File(path.into()),
        layers: Vec::new(),
        strictness: Strictness::Strict,
        gpu_resource: None,
    };
    assert_eq!(source.now().unwrap().config.mig_strategy, MigStrategy::Mixed);
}

#[tokio::test]
async fn config_unfit_for_host_is_refused_until_it_fits() {
    let folder = tempfile::tempdir().unwrap();
    let [path, channel] = ["config.yaml", "channel0"].map(|name| folder.path().join(name));
    write(&path, "single");
    let there = channel.clone();
    let fits = move |config: &Config| match config.mig_strategy != MigStrategy::Mixed || there.exists() {
        true => Ok(()),
        false => Err("there is no channel".to_owned()),
    };
    let mut followed = Followed::on(fits.clone(), ConfigLocation::File(path.clone())).await.unwrap();
    write(&path, "mixed");
    let report = followed.report(|report| report.problem.is_some()).await;
    assert_eq!(report.problem.as_deref(), Some(format!("{}: there is no channel", path.display()).as_str()));
    assert_eq!(followed.configs.borrow().mig_strategy, MigStrategy::Single);
    let at_start = Followed::on(fits, ConfigLocation::File(path.clone())).await;
    assert!(matches!(at_start, Err(SourceError::Wrong(_))));
    std::fs::write(&channel, "").unwrap();
    followed.config(MigStrategy::Mixed).await;
    let report = followed.report(|report| report.problem.is_none()).await;
    assert_eq!((report.loads, report.failures), (2, 1), "reported once");
}

fn seen(text: &str) -> Sighting {
    Sighting { source: "config.yaml".to_owned(), text: Ok(text.to_owned()) }
}

#[test]
fn emptied_file_is_accepted_once_it_stays_empty() {
    let start = std::time::Instant::now();
    let at = |milliseconds| start + Duration::from_millis(milliseconds);
    let (full, empty) = (seen("flags: {}"), seen("\n"));
    let mut doubt = files::Doubt::default();
    let mut wait = |seen: &Sighting, milliseconds| doubt.about(seen, Some(&full), at(milliseconds));
    assert_eq!(wait(&empty, 0), Some(Duration::from_secs(1)));
    assert_eq!(wait(&empty, 400), Some(Duration::from_millis(600)), "an event on the way");
    assert_eq!(wait(&full, 500), None);
    assert_eq!(wait(&empty, 900), Some(Duration::from_secs(1)), "emptied again");
    assert_eq!(wait(&empty, 1900), None);
}

#[test]
fn file_empty_before_or_missing_is_accepted_at_once() {
    let mut doubt = files::Doubt::default();
    let now = std::time::Instant::now();
    assert_eq!(doubt.about(&seen(""), Some(&seen("")), now), None);
    let gone = Sighting { text: Err("No such file".to_owned()), ..seen("") };
    assert_eq!(doubt.about(&gone, Some(&seen("a: b")), now), None);
    assert!(doubt.about(&seen(""), Some(&gone), now).is_some(), "made, and not written yet");
}

#[tokio::test]
async fn file_that_stays_empty_gives_the_defaults() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.yaml");
    write(&path, "single");
    let mut followed = Followed::of(ConfigLocation::File(path.clone())).await.unwrap();
    let emptied = std::time::Instant::now();
    std::fs::write(&path, "").unwrap();
    followed.config(MigStrategy::None).await;
    assert!(emptied.elapsed() >= Duration::from_secs(1), "a bound from below, which no load can break");
}

#[tokio::test]
async fn file_empty_at_start_is_accepted_after_a_pause() {
    let began = std::time::Instant::now();
    let mut doubt = files::Doubt::default();
    assert_eq!(
        doubt.about(&seen(""), None, began),
        Some(Duration::from_secs(1)),
        "and the defaults are not in effect meanwhile"
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.yaml");
    std::fs::write(&path, "").unwrap();
    let mut followed = Followed::of(ConfigLocation::File(path.clone())).await.unwrap();
    assert!(began.elapsed() >= Duration::from_secs(1), "a bound from below, which no load can break");
    followed.config(MigStrategy::None).await;
    assert!(files::stays_empty(Path::new("/dev/null")), "which is believed at once");
    assert!(!files::stays_empty(&path));
}

#[test]
fn gpu_name_of_a_flag_is_known_to_warnings() {
    let read = |text: &str| {
        let source = Source {
            place: ConfigLocation::Flags,
            layers: Vec::new(),
            strictness: Strictness::Strict,
            gpu_resource: Some("nvidia.com/foo".into()),
        };
        source.read("f", text).unwrap()
    };
    let shared = |name: &str| {
        format!("version: v1\nsharing: {{timeSlicing: {{resources: [{{name: {name}, replicas: 4}}]}}}}")
    };
    let warnings = read(&shared("nvidia.com/gpu")).warnings;
    let [warning] = &warnings[..] else { panic!("{warnings:?}") };
    insta::assert_snapshot!(warning, @r#"line 2: sharing.timeSlicing.resources[0].name: no device is called nvidia.com/gpu before it is shared, so that this entry has no effect; allowed: nvidia.com/foo, nvidia.com/mig-<profile>; did you mean "nvidia.com/foo"?"#);
    assert!(read(&shared("nvidia.com/foo")).warnings.is_empty());
    // The effective configuration can be read again, also if a pattern names every GPU already.
    let loaded = read("version: v1\nresources: {gpus: [{pattern: \"*\", name: nvidia.com/a}]}");
    assert_eq!(read(&loaded.config.to_json()).config, loaded.config);
}
