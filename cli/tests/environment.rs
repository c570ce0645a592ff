//! Variables as manifests set them: empty where there is nothing to say.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::collections::BTreeSet;

use support::{Run, gantry, machine, with};

/// Empty variables that mean something, as with NVIDIA's programs: no socket, false, standard output.
const MEANT: [&str; 6] = [
    "KUBELET_SOCKET",
    "FAIL_ON_INIT_ERROR",
    "GFD_FAIL_ON_INIT_ERROR",
    "GFD_USE_NODE_FEATURE_API",
    "USE_NODE_FEATURE_API",
    "GFD_OUTPUT_FILE",
];

/// Every variable that the help of a command tells of.
fn variables(command: &str) -> BTreeSet<String> {
    let help = gantry(&[command, "--help"]).stdout;
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    let lists = help.split("[env: ").skip(1).filter_map(|rest| rest.split(']').next());
    lists
        .flat_map(|list| list.split(','))
        .map(|name| name.trim().trim_end_matches(" too").trim_end_matches('=').to_owned())
        .collect()
}

fn outcome(run: &Run) -> (i32, &str, &str) {
    (run.code, &run.stdout, &run.stderr)
}

#[test]
fn empty_variable_counts_as_not_set() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(path("config.yaml"), "flags: {migStrategy: mixed}\n").unwrap();
    let check = format!("--check-config={}", path("config.yaml"));
    let machine = machine("hgx-h100.yaml");
    let labels = ["labels", "--from", &machine, "--no-timestamp"];
    let nowhere = format!("--kubeconfig={}", path("nowhere"));
    let commands: [&[&str]; 8] = [
        &["plugin", &check],
        // Ends for want of a node's name, and only for that.
        &["plugin"],
        &labels,
        &[labels.as_slice(), &["--to=node"]].concat(),
        &["extender", &nowhere],
        &["explain", &nowhere, "pod"],
        &["topo", "--from", &machine],
        &["choose", "--from", &machine, "--size=2"],
    ];
    let mut tried = BTreeSet::new();
    for words in commands {
        let names = variables(words[0]);
        let unset = gantry(words);
        for name in &names {
            let empty = with(words, &[(name, "")]);
            assert_eq!(empty.code, unset.code, "{name}= {words:?}: {}", empty.stderr);
            if !MEANT.contains(&name.as_str()) {
                assert_eq!(outcome(&empty), outcome(&unset), "{name}= {words:?}");
            }
        }
        let all: Vec<(&str, &str)> = names
            .iter()
            .filter(|name| !MEANT.contains(&name.as_str()))
            .map(|name| (name.as_str(), ""))
            .collect();
        assert_eq!(outcome(&with(words, &all)), outcome(&unset), "all of {words:?}");
        tried.extend(names);
    }
    for name in ["KUBECONFIG", "NODE_NAME", "NODE_LABEL", "LOG_FORMAT", "GANTRY_CONFIG_MAP"] {
        assert!(tried.contains(name), "{name}");
    }
    assert!(tried.len() > 60, "{tried:?}");
}

#[test]
fn list_items_may_have_spaces() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.yaml");
    std::fs::write(&file, "").unwrap();
    let check = format!("--check-config={}", file.display());
    for (name, value) in [
        ("FALLBACK_STRATEGIES", "named, single"),
        ("DEVICE_LIST_STRATEGY", "envvar, cdi-cri"),
        ("DP_DISABLE_HEALTHCHECKS", "13, 31"),
    ] {
        let run = with(&["plugin", &check], &[(name, value)]);
        assert_eq!(run.code, 0, "{name}: {}", run.stderr);
    }
}

#[test]
fn unknown_log_format_is_only_a_warning() {
    let machine = machine("hgx-h100.yaml");
    let labels = ["labels", "--from", &machine, "--no-timestamp"];
    let run = with(&labels, &[("LOG_FORMAT", "xml")]);
    assert_eq!((run.code, &run.stdout), (0, &gantry(&labels).stdout));
    insta::assert_snapshot!(run.stderr.split_once("WARN ").unwrap().1, @r#"gantry::runtime: LOG_FORMAT is not understood; it is text or json value="xml" using="text""#);
    // A flag goes over the variable, and is a person's.
    let run = with(&[&labels[..], &["--log-format=text"]].concat(), &[("LOG_FORMAT", "xml")]);
    assert_eq!((run.code, run.stderr.as_str()), (0, ""));
    let run = gantry(&[&labels[..], &["--log-format=xml"]].concat());
    assert_eq!(run.code, 2, "{}", run.stderr);
    let json = with(&["plugin", "--check-config=/nowhere"], &[("LOG_FORMAT", "json")]);
    assert_eq!(json.code, 1, "{}", json.stderr);
}

#[test]
fn invalid_value_names_its_variable() {
    for (name, value, flag) in [
        ("DP_DISABLE_HEALTHCHECKS", "79,foo", "--disable-health-checks"),
        ("FALLBACK_STRATEGIES", "named,first", "--fallback-strategies"),
        ("GANTRY_CONFIG_MAP", "configs", "--config-map"),
        ("KUBE_API_QPS", "few", "--kube-api-qps"),
    ] {
        let reported = format!("for 'environment variable {name} ({flag} <");
        let run = with(&["plugin", "--no-cluster"], &[(name, value)]);
        assert_eq!(run.code, 2, "{name}: {}", run.stderr);
        assert!(run.stderr.contains(&reported), "{name}: {}", run.stderr);
        // A flag goes over the variable, and the value is then the flag's.
        let given = format!("{flag}={value}");
        let run = with(&["plugin", "--no-cluster", &given], &[(name, value)]);
        assert_eq!(run.code, 2, "{name}: {}", run.stderr);
        assert!(!run.stderr.contains("environment"), "{name}: {}", run.stderr);
        assert!(run.stderr.contains(&format!("for '{flag} <")), "{name}: {}", run.stderr);
    }
}
