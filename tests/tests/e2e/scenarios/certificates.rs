//! Certificates and tokens that expire or are replaced: those between kube-scheduler and the extender, and those between
//! the extender and the API server. No daemon of Gantry is restarted for it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use gantry_e2e::gantry::{EXTENDER, NAMESPACE};
use gantry_e2e::{Program, until};
use k8s_openapi::api::authentication::v1::{
    BoundObjectReference, TokenRequest, TokenRequestSpec, TokenReview, TokenReviewSpec,
};
use k8s_openapi::api::core::v1::{Pod, Secret, ServiceAccount};
use kube::Api;
use kube::api::{DeleteParams, ObjectMeta, PostParams};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType, date_time_ymd,
};

use super::churn::nothing_is_left;
use super::gangs::restart_extender;
use super::gangs_failures::with_other_extenders;
use super::scheduler_settings::with_setting;
use crate::bed::Bed;
use crate::daemon_logs::Log;
use crate::gangs::GANG_LIMIT;
use crate::pods;
use crate::views::{self, probe};

/// The user that kube-scheduler is, and the common name of its certificate.
const SCHEDULER: &str = "system:kube-scheduler";
/// The year in which a certificate expires that is valid, and one that has expired.
const VALID: i32 = 4000;
const EXPIRED: i32 = 2020;

/// An authority for certificates of 127.0.0.1 and of kube-scheduler.
struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new(name: &str) -> Result<Self> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let pem = params.self_signed(&key)?.pem();
        Ok(Self { pem, issuer: Issuer::new(params, key) })
    }

    /// Writes certificate and key of a server at 127.0.0.1 that expires in that year.
    fn server(&self, folder: &Path, expires: i32) -> Result<()> {
        let mut params = CertificateParams::default();
        params.subject_alt_names.push(SanType::IpAddress([127, 0, 0, 1].into()));
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.not_after = date_time_ymd(expires, 1, 1);
        self.sign(folder, "tls", &params)
    }

    /// Writes certificate and key of a client.
    fn client(&self, folder: &Path, name: &str) -> Result<()> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(folder, "client", &params)
    }

    fn sign(&self, folder: &Path, name: &str, params: &CertificateParams) -> Result<()> {
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?.pem();
        fs::write(folder.join(format!("{name}.crt")), certificate)?;
        fs::write(folder.join(format!("{name}.key")), key.serialize_pem())?;
        Ok(())
    }
}

/// A new folder of that name for files that the programs of the control plane read.
fn folder(bed: &Bed, name: &str) -> Result<PathBuf> {
    let folder = bed.cluster().folder().join(name);
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    Ok(folder)
}

/// kube-scheduler calls the extender over TLS, as with extender-service.yaml. It verifies the certificate of each new
/// connection, so that an expired one holds GPU pods back from the next connection on.
pub(super) async fn expired_certificate_holds_gpu_pods_back(bed: &Bed) -> Result<()> {
    bed.gpus().await?;
    let api = bed.namespace("e2e-expired").await?;
    let files = folder(bed, "extender-tls")?;
    let authority = Authority::new("extenders")?;
    fs::write(files.join("ca.crt"), &authority.pem)?;
    authority.server(&files, VALID)?;
    authority.client(&files, SCHEDULER)?;
    let path = |name: &str| files.join(name).display().to_string();
    let options = [
        format!("--tls-cert={}", path("tls.crt")),
        format!("--tls-key={}", path("tls.key")),
        format!("--client-ca={}", path("ca.crt")),
        format!("--client-name={SCHEDULER}"),
    ];
    let plain = "urlPrefix: http://127.0.0.1:8010";
    let with_tls = format!(
        "urlPrefix: https://127.0.0.1:8010\n    enableHTTPS: true\n    \
         tlsConfig: {{caFile: {}, certFile: {}, keyFile: {}}}",
        path("ca.crt"),
        path("client.crt"),
        path("client.key")
    );
    restart_extender(bed, &options).await?;
    let outcome = with_setting(bed, (plain, &with_tls), async || {
        pods::run(&api, &pods::sleeper("valid", 1)?).await?;
        let log = Log::of(&bed.cluster().control().daemon(EXTENDER)?);
        authority.server(&files, EXPIRED)?;
        log.has("new TLS files are in effect").await?;
        // Over the connection of before.
        pods::run(&api, &pods::sleeper("connected", 1)?).await?;

        restart_extender(bed, &options).await?;
        api.create(&PostParams::default(), &pods::sleeper("waits", 1)?).await?;
        let about = ("Pod", "waits", None);
        views::event(bed, "e2e-expired", about, "FailedScheduling", &["certificate has expired"]).await?;
        let line = "certificate_expiry_timestamp_seconds{file=\"tls-cert\"}";
        let expiry = views::Metrics::read(bed).await?.of(line);
        ensure!((expiry - 1_577_836_800.0).abs() < 1.0, "the metric of the expiry is {expiry}");
        pods::run(&api, &pods::sleeper("without-gpus", 0)?).await?;
        for name in ["valid", "connected"] {
            ensure!(pods::phase(&api.get(name).await?) == "Running", "{name} does not run");
        }
        ensure!(pods::node(&api.get("waits").await?).is_empty(), "it was scheduled");

        authority.server(&files, VALID)?;
        pods::running(&api, "waits").await?;
        Ok(())
    })
    .await;
    restart_extender(bed, &[]).await?;
    outcome?;
    for name in ["valid", "connected", "waits"] {
        api.delete(name, &DeleteParams::default()).await?;
    }
    nothing_is_left(bed).await
}

/// The folder of a service account's files in a container; /var/run leads to it.
const ACCOUNT: &str = "/run/secrets/kubernetes.io/serviceaccount";
/// A second API server, and the extender that has it for its own, as in a pod.
const API_SERVER: &str = "kube-apiserver-rotated";
const IN_POD: &str = "gantry-extender-in-pod";
const PORT: &str = "16445";
/// The client reads token and authority again when they are a minute old.
const READ_AGAIN: Duration = Duration::from_secs(61);

/// The extender runs with the files of a service account as in a pod. Its first token becomes invalid, and another
/// authority issues the certificate of its API server. The same process goes on with what the files contain then.
pub(super) async fn rotated_token_and_authority_are_read(bed: &Bed) -> Result<()> {
    bed.gpus().await?;
    let api = bed.namespace("e2e-rotated").await?;
    with_other_extenders(bed, [IN_POD, API_SERVER], async || rotate(bed, &api).await).await?;
    nothing_is_left(bed).await
}

async fn rotate(bed: &Bed, api: &Api<Pod>) -> Result<()> {
    let control = bed.cluster().control();
    let (server, account) = (folder(bed, "rotated-api")?, control.file(ACCOUNT));
    fs::create_dir_all(&account)?;
    let (before, after) = (Authority::new("before")?, Authority::new("after")?);
    before.server(&server, VALID)?;
    fs::write(account.join("ca.crt"), &before.pem)?;
    fs::write(account.join("namespace"), NAMESPACE)?;
    let first = token(bed, "token-before").await?;
    fs::write(account.join("token"), &first)?;
    control.run(second_api_server(bed, &server)?).await?;
    serves(bed).await?;
    let extender = control.run(in_pod(bed)?).await?;
    probe(control, 8011, "/readyz", 200, "").await?;
    pods::run(api, &pods::sleeper("before", 1)?).await?;

    // The files change first, as kubelet does it: the earlier token and certificate stay valid for a while.
    fs::write(account.join("token"), token(bed, "token-after").await?)?;
    fs::write(account.join("ca.crt"), format!("{}{}", before.pem, after.pem))?;
    tokio::time::sleep(READ_AGAIN).await;
    let log = Log::of(&extender);
    let secrets: Api<Secret> = Api::namespaced(bed.client(), NAMESPACE);
    secrets.delete("token-before", &DeleteParams::default()).await?;
    let reviews: Api<TokenReview> = Api::all(bed.client());
    let spec = TokenReviewSpec { token: Some(first), ..TokenReviewSpec::default() };
    let review = TokenReview { spec, ..TokenReview::default() };
    until("the first token is invalid", GANG_LIMIT, async || {
        let review = reviews.create(&PostParams::default(), &review).await;
        match review.map_err(|error| error.to_string())?.status.and_then(|status| status.authenticated) {
            Some(true) => Err("it is valid"),
            _ => Ok(()),
        }
        .map_err(str::to_owned)
    })
    .await?;
    pods::run(api, &pods::sleeper("other-token", 1)?).await?;
    ensure!(!log.text()?.contains("Unauthorized"), "{}", log.text()?);

    after.server(&server, VALID)?;
    fs::write(account.join("ca.crt"), &after.pem)?;
    control.daemon(API_SERVER)?.kill().await?;
    let start = Instant::now();
    control.run_again(API_SERVER).await?;
    serves(bed).await?;
    probe(control, 8011, "/readyz", 200, "").await?;
    pods::run(api, &pods::sleeper("other-authority", 1)?).await?;
    ensure!(extender.is_running(), "the extender ended");
    let lasted = start.elapsed();
    ensure!(lasted < Duration::from_secs(60), "it leads again after {lasted:?}");
    for name in ["before", "other-token", "other-authority"] {
        api.delete(name, &DeleteParams::default()).await?;
    }
    secrets.delete("token-after", &DeleteParams::default()).await?;
    Ok(())
}

/// A token of the extender's account that is valid as long as a Secret of that name exists.
async fn token(bed: &Bed, secret: &str) -> Result<String> {
    let secrets: Api<Secret> = Api::namespaced(bed.client(), NAMESPACE);
    let metadata = ObjectMeta { name: Some(secret.to_owned()), ..ObjectMeta::default() };
    let made = secrets.create(&PostParams::default(), &Secret { metadata, ..Secret::default() }).await?;
    let bound = BoundObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Secret".to_owned()),
        name: made.metadata.name,
        uid: made.metadata.uid,
    };
    let spec = TokenRequestSpec { bound_object_ref: Some(bound), ..TokenRequestSpec::default() };
    let request = TokenRequest { spec, ..TokenRequest::default() };
    let accounts: Api<ServiceAccount> = Api::namespaced(bed.client(), NAMESPACE);
    let issued = accounts.create_token_request(EXTENDER, &PostParams::default(), &request).await?;
    Ok(issued.status.context("a token")?.token)
}

/// Another API server of the same etcd, with the certificate of that folder.
fn second_api_server(bed: &Bed, files: &Path) -> Result<Program> {
    let mut program = bed.cluster().control().program("kube-apiserver")?;
    API_SERVER.clone_into(&mut program.name);
    program.args.retain(|arg| !["--secure-port=", "--tls-"].iter().any(|flag| arg.starts_with(flag)));
    program.args.extend([
        format!("--secure-port={PORT}"),
        format!("--tls-cert-file={}", files.join("tls.crt").display()),
        format!("--tls-private-key-file={}", files.join("tls.key").display()),
        // The Service of the API server leads to the other one.
        "--endpoint-reconciler-type=none".to_owned(),
    ]);
    Ok(program)
}

/// Waits until the second API server is ready.
async fn serves(bed: &Bed) -> Result<()> {
    let control = bed.cluster().control();
    let kubeconfig = bed.cluster().kubeconfig().display().to_string();
    let server = format!("--server=https://127.0.0.1:{PORT}");
    let ask = [
        "kubectl",
        "--kubeconfig",
        &kubeconfig,
        &server,
        "--insecure-skip-tls-verify",
        "get",
        "--raw",
        "/readyz",
    ];
    until("the second API server is ready", GANG_LIMIT, async || control.exec(&ask).await.map(drop)).await?;
    Ok(())
}

/// The extender as it was started last, with the variables of a pod in place of a kubeconfig.
fn in_pod(bed: &Bed) -> Result<Program> {
    let mut program = bed.cluster().control().program(EXTENDER)?;
    IN_POD.clone_into(&mut program.name);
    program.env.remove("KUBECONFIG").context("the extender has a kubeconfig")?;
    let host = program.env("KUBERNETES_SERVICE_HOST", "127.0.0.1");
    Ok(host.env("KUBERNETES_SERVICE_PORT", PORT))
}
