//! The help of every command, and the errors of wrong command lines. The pages are those of the default features.
#![cfg(feature = "demo")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use support::gantry;

#[test]
fn every_command_has_help() {
    let mut pages = Vec::new();
    let commands = [
        "",
        "plugin",
        "extender",
        "topo",
        "choose",
        "labels",
        "explain",
        "map",
        "scheduler-config",
        "doctor",
        "migrate",
        "demo",
    ];
    for command in commands {
        let words: Vec<&str> = [command, "--help"].into_iter().filter(|word| !word.is_empty()).collect();
        let run = gantry(&words);
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{command}");
        pages.push(format!("$ gantry {}\n{}", words.join(" "), run.stdout));
    }
    insta::assert_snapshot!(pages.join("\n"));
}

#[test]
fn the_version_is_the_packages() {
    let run = gantry(&["--version"]);
    assert_eq!(run.stdout, format!("gantry {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn wrong_command_line_suggests_the_nearest_one() {
    for (words, nearest) in [
        (&["plugn"][..], "plugin"),
        (&["demo", "--wach"], "--watch"),
        (&["extender", "--listn=1"], "--listen"),
        (&["--log-format=jsno", "demo"], "json"),
    ] {
        let run = gantry(words);
        assert_eq!(run.code, 2, "{words:?}");
        assert!(run.stderr.contains(nearest), "{words:?}: {}", run.stderr);
    }
}

#[test]
fn unknown_flag_with_one_dash_is_named() {
    for (flag, named) in [
        ("-host-path=/usr/lib/nvidia", "'--host-path'"),
        ("-oneshoot", "'--oneshoot'"),
        ("-logtostderr", "'--logtostderr'"),
    ] {
        let run = gantry(&["plugin", "--node-name", "n", flag]);
        assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{flag}");
        assert!(run.stderr.contains(named), "{}", run.stderr);
    }
}

#[test]
fn without_a_command_the_help_is_shown() {
    let run = gantry(&[]);
    assert_eq!(run.code, 2);
    assert!(run.stderr.contains("Usage: gantry"), "{}", run.stderr);
}
