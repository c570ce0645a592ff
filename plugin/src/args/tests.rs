use clap::Parser;

use super::*;
use gantry_config::source::{Configs, Fallback};
use gantry_config::{Config, Strictness};

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    args: Args,
}

fn parse(words: &[&str]) -> Result<Args, clap::Error> {
    Command::try_parse_from([&["plugin"], words].concat()).map(|command| command.args)
}

/// The error itself, without the usage below it.
fn first_line(error: &clap::Error) -> String {
    error.to_string().lines().next().unwrap().to_owned()
}

#[test]
fn health_checks_are_on_except_disabled_ones() {
    let watched = |words: &[&str], xid| {
        let args = parse(&[&["--node-name=a"], words].concat()).unwrap();
        args.health_checks().watches(xid)
    };
    assert!(watched(&[], 79));
    let but = ["--disable-health-checks=48,79"];
    assert!(!watched(&but, 79) && watched(&but, 74));
    let just = ["--disable-health-checks=all", "--enable-health-checks=79"];
    assert!(watched(&just, 79) && !watched(&just, 74));
    let error = parse(&["--node-name=a", "--disable-health-checks=ecc"]).unwrap_err();
    insta::assert_snapshot!(first_line(&error), @r#"error: invalid value 'ecc' for '--disable-health-checks <XIDS>': "ecc" is not a health check; write all, xids, or Xid numbers separated by commas, such as 48,79"#);
}

#[test]
fn listen_accepts_port_and_localhost() {
    let listen = |text: &str| {
        let args = parse(&["--no-cluster", &format!("--listen={text}")])?;
        Ok::<_, clap::Error>(args.listen)
    };
    let all = listen(":9410").unwrap();
    assert!(all.ip().is_unspecified() && all.port() == 9410, "{all}");
    assert_eq!(listen("localhost:9410").unwrap(), ([127, 0, 0, 1], 9410).into());
    assert_eq!(listen("[::1]:9410").unwrap().to_string(), "[::1]:9410");
    let refused = |text| first_line(&listen(text).unwrap_err());
    insta::assert_snapshot!(["9410", "node-1:9410", ":99999", ":"].map(refused).join("\n"), @r"
    error: invalid value '9410' for '--listen <ADDRESS:PORT>': write ADDRESS:PORT, such as 0.0.0.0:9410 or [::]:9410, :9410 for all addresses, or localhost:9410
    error: invalid value 'node-1:9410' for '--listen <ADDRESS:PORT>': write ADDRESS:PORT, such as 0.0.0.0:9410 or [::]:9410, :9410 for all addresses, or localhost:9410
    error: invalid value ':99999' for '--listen <ADDRESS:PORT>': write ADDRESS:PORT, such as 0.0.0.0:9410 or [::]:9410, :9410 for all addresses, or localhost:9410
    error: invalid value ':' for '--listen <ADDRESS:PORT>': write ADDRESS:PORT, such as 0.0.0.0:9410 or [::]:9410, :9410 for all addresses, or localhost:9410
    ");
}

#[test]
fn socket_paths_have_defaults_and_flags() {
    let places = |words: &[&str]| {
        let args = parse(&[&["--node-name=a"], words].concat()).unwrap();
        (args.device_plugin_dir.clone(), args.kubelet_socket())
    };
    let folder = PathBuf::from("/var/lib/kubelet/device-plugins");
    assert_eq!(places(&[]), (folder.clone(), Some(folder.join("kubelet.sock"))));
    let moved = PathBuf::from("/opt/kubelet/plugins");
    let reported = places(&["--device-plugin-dir=/opt/kubelet/plugins"]);
    assert_eq!(reported, (moved.clone(), Some(moved.join("kubelet.sock"))));
}

#[test]
fn nvidia_flags_are_accepted() {
    let args = parse(&[
        "--no-cluster",
        "--mig-strategy",
        "mixed",
        "--fail-on-init-error=false",
        "--pass-device-specs",
        "--device-list-strategy=envvar,cdi-cri",
        "--dev-root=/host",
        "--kubelet-socket=",
        "--no-timestamp",
        "-o",
        "/labels",
    ])
    .unwrap();
    let config = args.config_now().unwrap().config;
    assert!(config.pass_device_specs && !config.fail_on_init_error && config.gfd.no_timestamp);
    assert_eq!(config.device_list_strategy.len(), 2);
    assert_eq!(config.dev_root.to_str(), Some("/host"));
    assert_eq!(args.dev_root.to_str(), Some("/dev"), "where this process reads it");
    assert_eq!(args.kubelet_socket(), None);
}

#[test]
fn default_flags_use_kubelet_folder_and_no_cluster_config() {
    let args = parse(&["--no-cluster", "--device-plugin-dir=/plugins"]).unwrap();
    assert_eq!(args.kubelet_socket(), Some("/plugins/kubelet.sock".into()));
    assert_eq!(args.config_now().unwrap().config, Config::default());
    assert_eq!(args.config.configs(), None);
}

#[test]
fn unknown_word_is_refused_with_the_nearest() {
    let error = parse(&["--no-cluster", "--device-list-strategy=cdi-cir"]).unwrap_err();
    insta::assert_snapshot!(first_line(&error), @r#"error: command line: --device-list-strategy: "cdi-cir" is not allowed; allowed: envvar, volume-mounts, cdi-annotations, cdi-cri; did you mean "cdi-cri"?"#);
    let error = parse(&["--no-cluster", "--resource-name=amd.com/gpu"]).unwrap_err();
    insta::assert_snapshot!(first_line(&error), @r#"error: invalid value 'amd.com/gpu' for '--resource-name <NAME>': "amd.com/gpu" is not in the domain nvidia.com: "amd.com" cannot be served; write a name such as nvidia.com/gpu or gpu"#);
}

#[test]
fn resource_name_applies_after_patterns() {
    let args = parse(&["--no-cluster", "--resource-name=accelerator"]).unwrap();
    let patterns = args.config_now().unwrap().config.gpu_patterns;
    assert_eq!(patterns[0].pattern, "*");
    assert_eq!(patterns[0].name.as_str(), "nvidia.com/accelerator");
}

#[test]
fn resource_name_may_be_shared() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.yaml");
    let text = "sharing: {timeSlicing: {resources: [{name: accelerator, replicas: 2}]}}";
    std::fs::write(&file, text).unwrap();
    let file = format!("--config-file={}", file.display());
    let warnings = |more: &[&str]| {
        let args = parse(&[&["--no-cluster", &file], more].concat()).unwrap();
        args.config_now().unwrap().warnings.len()
    };
    assert_eq!(warnings(&[]), 1);
    assert_eq!(warnings(&["--resource-name=accelerator"]), 0);
}

#[test]
fn leniency_is_parsed_as_a_boolean() {
    let strictness = |flag: &str| {
        let args = parse(&["--no-cluster", flag]).unwrap();
        args.config.leniency.strictness()
    };
    for flag in ["--lenient-config", "--lenient-config=1", "--lenient-config=True"] {
        assert_eq!(strictness(flag), Strictness::Lenient, "{flag}");
    }
    assert_eq!(strictness("--lenient-config="), Strictness::Strict);
    assert!(parse(&["--no-cluster", "--lenient-config=yes"]).is_err());
}

#[test]
fn config_manager_flags_have_aliases() {
    let ours = ["--config-dir=/configs", "--config-label=example.com/gpu"];
    let nvidias = ["--config-file-srcdir=/configs", "--node-label=example.com/gpu"];
    for [folder, label] in [ours, nvidias] {
        let args = parse(&["--node-name=a", folder, label]).unwrap();
        assert_eq!(args.config.configs(), Some(Configs::Folder("/configs".into())));
        assert_eq!(args.config.config_label, "example.com/gpu");
    }
}

#[test]
fn api_rate_flags_are_numbers_without_effect() {
    let args = parse(&["--no-cluster", "--kube-api-qps=0.5", "--kube-api-burst", "10"]).unwrap();
    assert_eq!(args.api_rate, ApiRate { kube_api_qps: Some(0.5), kube_api_burst: Some(10) });
    for wrong in ["--kube-api-qps=few", "--kube-api-burst=1.5"] {
        let error = parse(&["--no-cluster", wrong]).unwrap_err().to_string();
        assert!(error.contains("invalid value"), "{error}");
    }
}

#[test]
fn config_map_requires_namespace() {
    let args =
        parse(&["--node-name=a", "--config-map=gpu/configs", "--fallback-strategies=single, empty"]).unwrap();
    assert_eq!(
        args.config.configs(),
        Some(Configs::ConfigMap { namespace: "gpu".into(), name: "configs".into() })
    );
    assert_eq!(args.config.choice().fallbacks, [Fallback::Single, Fallback::Empty]);
    for wrong in ["--config-map=configs", "--config-map=/x", "--fallback-strategies=first"] {
        assert!(parse(&["--node-name=a", wrong]).is_err(), "{wrong}");
    }
}

#[test]
fn file_flag_overrides_configs_of_variable() {
    let by_variable = |ids: &[&'static str], words: &[&str]| {
        let words = [&["--node-name=a"], words].concat();
        by_variable(ids, &words).unwrap().config
    };
    let here = env!("CARGO_MANIFEST_DIR");
    let folder = Some(Configs::Folder(here.into()));

    let flag = by_variable(&["config_dir"], &["--config-file=deny.yaml"]);
    assert_eq!((flag.configs(), flag.unread()), (None, None));
    assert_eq!(flag.file(), Some("deny.yaml".into()));
    let empty = by_variable(&["config_dir"], &["--config-file="]);
    assert_eq!((empty.configs(), empty.unread()), (folder.clone(), None));

    let other = by_variable(&["config_file"], &["--config-map=gpu/configs"]);
    assert!(other.configs().is_some() && other.unread().is_none());

    let variables = by_variable(&["config_file", "config_dir"], &[]);
    assert_eq!(variables.configs(), folder);
    assert_eq!(
        variables.unread(),
        Some(format!("CONFIG_FILE is not read: the node's label chooses from the folder {here}"))
    );
    let flags = by_variable(&[], &["--config-file=x", "--config-map=gpu/configs"]);
    assert_eq!(
        flags.unread().as_deref(),
        Some("--config-file is not read: the node's label chooses from the ConfigMap gpu/configs")
    );
}

/// With these variables set, each to a folder that is there.
fn by_variable(ids: &[&'static str], words: &[&str]) -> Result<Args, clap::Error> {
    use clap::{CommandFactory, FromArgMatches};

    // A variable that cargo sets for every test.
    let command = ids.iter().fold(Command::command(), |command, id| {
        command.mut_arg(id, |argument| argument.env("CARGO_MANIFEST_DIR"))
    });
    let line = [&["plugin"], words].concat();
    let matches = command.try_get_matches_from(line)?;
    Ok(Command::from_arg_matches(&matches)?.args)
}

#[test]
fn no_cluster_needs_no_node_name_and_allows_kubeconfig() {
    assert!(parse(&["--no-cluster"]).is_ok());
    let args = by_variable(&["kubeconfig"], &["--no-cluster"]).unwrap();
    assert!(args.no_cluster && args.kubeconfig.is_some());
}

#[test]
fn folder_or_config_map_of_flag_wins() {
    let folder = by_variable(&["config_map"], &["--node-name=a", "--config-dir=/x"]);
    // A path is a bad name of a ConfigMap, and that it goes unused excuses it not.
    insta::assert_snapshot!(first_line(&folder.unwrap_err()).replace(env!("CARGO_MANIFEST_DIR"), "/folder"), @r#"error: invalid value '/folder' for '--config-map <NAMESPACE/NAME>': "/folder" names no ConfigMap; write NAMESPACE/NAME, such as gpu-operator/device-plugin-config"#);
    let map = by_variable(&["config_dir"], &["--node-name=a", "--config-map=gpu/configs"]).unwrap();
    assert!(matches!(map.config.configs(), Some(Configs::ConfigMap { .. })));
    let both = parse(&["--node-name=a", "--config-map=gpu/configs", "--config-dir=/x"]);
    insta::assert_snapshot!(first_line(&both.unwrap_err()), @"error: --config-map and --config-dir (the variables GANTRY_CONFIG_MAP and CONFIG_FILE_SRCDIR) both say where the configurations are; give one");
    let empty = parse(&["--node-name=a", "--config-map=gpu/configs", "--config-dir="]).unwrap();
    assert!(matches!(empty.config.configs(), Some(Configs::ConfigMap { .. })));
}

#[test]
fn last_of_repeated_flags_counts() {
    let words =
        ["--node-name=a", "--config-file=x", "--config-file=y", "--kubelet-socket=s", "--kubelet-socket=t"];
    let args = parse(&words).unwrap();
    assert_eq!(args.config.file(), Some("y".into()));
    assert_eq!(args.kubelet_socket.as_deref(), Some("t"));
    let args =
        parse(&["--node-name=a", "--fallback-strategies=single", "--fallback-strategies=empty"]).unwrap();
    assert_eq!(args.config.choice().fallbacks, [Fallback::Single, Fallback::Empty]);
}
