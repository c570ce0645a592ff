//! What a stranger reads: the help of every command, and what a wrong command line is answered.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use support::gantry;

#[test]
fn every_command_explains_itself() {
    let mut pages = Vec::new();
    for command in [
        "", "plugin", "extender", "topo", "choose", "labels", "explain", "demo",
    ] {
        let words: Vec<&str> = [command, "--help"]
            .into_iter()
            .filter(|word| !word.is_empty())
            .collect();
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
fn a_wrong_command_line_names_the_nearest_right_one_and_exits_with_2() {
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
fn a_flag_of_another_plugin_with_one_dash_is_told_by_its_name() {
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
