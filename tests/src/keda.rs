//! The resource definition of KEDA's ScaledObject, from KEDA's Go module. `components/keda` has its version. KEDA itself
//! does not run.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::components::{self, GO_ENV, MODULES};
use crate::{Cluster, Error, Result};

const MODULE: &str = "github.com/kedacore/keda/v2";
const CRD: &str = "config/crd/bases/keda.sh_scaledobjects.yaml";

impl Cluster {
    /// Installs the definition of KEDA's ScaledObject.
    ///
    /// # Errors
    /// The module cannot be downloaded, or the API server refuses the definition.
    pub async fn install_keda_resources(&self) -> Result<()> {
        let crd = module_folder()?.join(CRD).display().to_string();
        // Too large for the annotation of a client-side apply.
        self.kubectl(&["apply", "--server-side", "-f", &crd]).await?;
        Ok(())
    }
}

/// The folder of KEDA's module, which is downloaded where it is missing.
fn module_folder() -> Result<PathBuf> {
    let folder = Path::new(MODULES).join("keda");
    let mut download = Command::new("go");
    download.current_dir(&folder).envs(GO_ENV).args(["mod", "download", "-json", MODULE]);
    let described: serde_json::Value = serde_json::from_slice(&components::run(download)?)
        .map_err(|source| Error::Json { path: folder.clone(), source })?;
    Ok(described["Dir"].as_str().unwrap_or_default().into())
}
