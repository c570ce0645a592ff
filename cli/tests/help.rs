//! The help of every command, and the errors of wrong command lines. The pages are those of the default features.
#![cfg(feature = "demo")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use support::gantry;

/// The page also shows each change of a help text in a review.
#[test]
fn reference_has_the_help_of_every_command() {
    let page = include_str!("../../docs/reference/cli.md");
    let run = gantry(&["man", "--markdown"]);
    assert_eq!((run.code, run.stderr.as_str()), (0, ""));
    let differs = run.stdout.lines().zip(page.lines()).find(|(now, before)| now != before);
    assert!(
        run.stdout == page,
        "docs/reference/cli.md is not the help of this program ({differs:?}); run `gantry man --markdown > docs/reference/cli.md`"
    );
}

#[test]
fn help_fits_80_columns() {
    let page = gantry(&["man", "--markdown"]).stdout;
    for command in ["extender", "plugin", "explain queue", "map", "doctor", "demo"] {
        assert!(page.contains(&format!("\n## gantry {command}\n")), "{command}");
    }
    // A word that is longer than a line cannot be wrapped.
    let long = page.lines().skip(4).filter(|line| line.chars().count() > 80 && line.trim().contains(' '));
    assert_eq!(long.collect::<Vec<_>>(), Vec::<&str>::new());
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
