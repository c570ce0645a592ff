//! The real helm, in both of its major versions, built once per state of `components/helm`, whose go.mod contains the
//! versions.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::{Error, Result, components, gantry};

/// A helm program.
#[derive(Debug, Clone)]
pub struct Helm {
    program: PathBuf,
}

impl Helm {
    /// The program of a major version, 3 or 4, built first where it is missing.
    ///
    /// # Errors
    /// There is no Go, or it does not build.
    pub fn locate_or_build(major: u8) -> Result<Self> {
        let package = format!("helm.sh/helm/v{major}/cmd/helm");
        let program = components::program("helm", &package, "", &["go.mod", "go.sum"])?;
        Ok(Self { program })
    }

    /// The path of the program.
    #[must_use]
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Runs helm with no more than the given arguments and a kubeconfig.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn run(&self, kubeconfig: Option<&Path>, args: &[&str]) -> Result<Output> {
        let mut helm = Command::new(&self.program);
        helm.args(args).env_remove("KUBECONFIG").envs(kubeconfig.map(|path| ("KUBECONFIG", path)));
        helm.output().map_err(|source| Error::Start { program: self.program.display().to_string(), source })
    }

    /// What helm writes to standard output.
    ///
    /// # Errors
    /// It fails.
    pub fn output(&self, kubeconfig: Option<&Path>, args: &[&str]) -> Result<String> {
        let output = self.run(kubeconfig, args)?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        Err(Error::Command {
            command: format!("helm {}", args.join(" ")),
            status: output.status,
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }

    /// Installs a release of a chart in a namespace, or upgrades it to these values.
    ///
    /// # Errors
    /// It fails.
    pub fn upgrade(
        &self,
        kubeconfig: &Path,
        chart: &Path,
        (release, namespace): (&str, &str),
        values: &[&str],
    ) -> Result<String> {
        let chart = chart.display().to_string();
        let mut args =
            vec!["upgrade", "--install", release, &chart, "--namespace", namespace, "--create-namespace"];
        args.extend(values.iter().flat_map(|value| ["--set", *value]));
        self.output(Some(kubeconfig), &args)
    }
}

/// The folder of the chart.
#[must_use]
pub fn chart() -> PathBuf {
    gantry::manifests().join("../charts/gantry")
}
