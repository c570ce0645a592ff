//! TLS for the calls of kube-scheduler, and for those of the API server: certificate, key and client authority from files, which are read
//! again when they change. At the start an error names file and reason; later a bad file is ignored and the last good one stays in effect.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{self, RootCertStore, ServerConfig};
use tokio_util::sync::CancellationToken;

/// Interval of the checks for changed files. Kubelet changes those of a Secret within a minute or so.
const LOOK: Duration = Duration::from_secs(5);
/// Largest file read: a chain of certificates is a few KiB.
const LARGEST: u64 = 1024 * 1024;

/// The options that name the files of a server, for messages and metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileOptions {
    /// Names the certificate chain.
    pub cert: &'static str,
    /// Names the private key.
    pub key: &'static str,
}

impl FileOptions {
    /// Of the listener for kube-scheduler.
    pub const VERBS: &'static Self = &Self { cert: "--tls-cert", key: "--tls-key" };
    /// Of the webhook.
    pub const WEBHOOK: &'static Self = &Self { cert: "--webhook-cert", key: "--webhook-key" };
}

/// Paths of certificate, key and client authority.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    /// The options that name certificate and key.
    pub options: &'static FileOptions,
    /// Certificate chain, the server's own first.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// Authorities of the clients that may call the verbs; without them every client may.
    pub client_ca: Option<PathBuf>,
    /// The common name of the certificate of the client that may call the verbs.
    pub client_name: String,
}

/// A client that may not call the verbs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum UntrustedClient {
    /// It has no certificate.
    #[error("decisions are for clients with a certificate of --client-ca")]
    NoCertificate,
    /// Its certificate has another name.
    #[error(
        "decisions are for the client {expected:?} (--client-name); the name of this certificate is {name:?}"
    )]
    OtherName {
        /// The common name.
        name: String,
        /// The one that may.
        expected: String,
    },
}

/// Why TLS is not available.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("{option} {path}: {error}")]
    Read {
        /// The option that names it.
        option: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// A file has another content.
    #[error("{option} {path}: {words}")]
    Content {
        /// The option that names it.
        option: &'static str,
        /// The file.
        path: PathBuf,
        /// The fault.
        words: String,
    },
    /// Certificate and key do not belong together.
    #[error("{} {cert} and {} {key} do not belong together: {error}", .options.cert, .options.key)]
    Pair {
        /// The options that name them.
        options: &'static FileOptions,
        /// The certificate.
        cert: PathBuf,
        /// The key.
        key: PathBuf,
        /// Why.
        error: rustls::Error,
    },
}

/// The TLS configuration in effect.
#[derive(Debug)]
pub struct Tls {
    files: Files,
    now: ArcSwap<ServerConfig>,
    expiries: ArcSwap<Vec<Expiry>>,
    /// Content of the files when they were first read.
    first: Read,
}

/// When the first certificate of a file expires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expiry {
    /// The option that names the file, without dashes.
    pub option: &'static str,
    /// In seconds since 1970.
    pub at: i64,
}

/// The files' bytes, by which a change is detected.
#[derive(Clone, PartialEq)]
struct Read {
    cert: Vec<u8>,
    key: Vec<u8>,
    client_ca: Option<Vec<u8>>,
}

impl Read {
    /// When the certificates expire, of each file the first.
    fn expiries(&self, options: &FileOptions) -> Vec<Expiry> {
        let cert = options.cert.trim_start_matches('-');
        let files = [(cert, Some(&self.cert)), ("client-ca", self.client_ca.as_ref())];
        let expiry = |(option, bytes): (&'static str, Option<&Vec<u8>>)| {
            let certificates = CertificateDer::pem_slice_iter(bytes?).flatten();
            let ends = certificates.filter_map(|certificate| {
                let (_, certificate) = x509_parser::parse_x509_certificate(&certificate).ok()?;
                Some(certificate.validity().not_after.timestamp())
            });
            Some(Expiry { option, at: ends.min()? })
        };
        files.into_iter().filter_map(expiry).collect()
    }
}

/// The key is not printed.
impl std::fmt::Debug for Read {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Read")
    }
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// See [`TlsError`].
    pub fn load(files: Files) -> Result<Self, TlsError> {
        let first = files.read()?;
        let config = files.config(&first)?;
        let expiries = ArcSwap::from_pointee(first.expiries(files.options));
        Ok(Self { files, now: ArcSwap::from_pointee(config), expiries, first })
    }

    /// The configuration for a new connection.
    pub fn config(&self) -> Arc<ServerConfig> {
        self.now.load_full()
    }

    /// When the certificates in effect expire.
    pub fn expiries(&self) -> Arc<Vec<Expiry>> {
        self.expiries.load_full()
    }

    /// Whether a client with this certificate may call the verbs.
    ///
    /// # Errors
    /// Why it may not.
    pub(crate) fn check_client(&self, certificate: Option<&[u8]>) -> Result<(), UntrustedClient> {
        if !self.wants_clients() {
            return Ok(());
        }
        // rustls has verified it.
        let name = common_name(certificate.ok_or(UntrustedClient::NoCertificate)?).unwrap_or_default();
        let expected = &self.files.client_name;
        match name == *expected {
            true => Ok(()),
            false => Err(UntrustedClient::OtherName { name, expected: expected.clone() }),
        }
    }

    /// Whether clients need a certificate to call the verbs.
    pub fn wants_clients(&self) -> bool {
        self.files.client_ca.is_some()
    }

    /// Applies new files until `shutdown`.
    pub async fn follow(&self, shutdown: CancellationToken) {
        // The content in effect: the files may have changed since.
        let mut known = self.first.clone();
        let mut logged = String::new();
        while shutdown.run_until_cancelled(tokio::time::sleep(LOOK)).await.is_some() {
            // A few KiB from the page cache, on a task of its own.
            match self.files.read() {
                Ok(read) if known == read => {}
                Ok(read) => match self.files.config(&read) {
                    Ok(config) => {
                        self.now.store(Arc::new(config));
                        self.expiries.store(Arc::new(read.expiries(self.files.options)));
                        tracing::info!(cert = %self.files.cert.display(), "new TLS files are in effect");
                        known = read;
                        logged.clear();
                    }
                    Err(error) => log_once(&error, &mut logged),
                },
                Err(error) => log_once(&error, &mut logged),
            }
        }
    }
}

/// Logs each reason once: certificate and key change one after the other, and a wrong file may stay for long.
fn log_once(error: &TlsError, logged: &mut String) {
    let words = error.to_string();
    if *logged != words {
        tracing::warn!(error = %words, "new TLS files are ignored");
        *logged = words;
    }
}

impl Files {
    fn read(&self) -> Result<Read, TlsError> {
        Ok(Read {
            cert: read(self.options.cert, &self.cert)?,
            key: read(self.options.key, &self.key)?,
            client_ca: self.client_ca.as_deref().map(|path| read("--client-ca", path)).transpose()?,
        })
    }

    fn config(&self, read: &Read) -> Result<ServerConfig, TlsError> {
        let chain = certificates(self.options.cert, &self.cert, &read.cert)?;
        let key = PrivateKeyDer::from_pem_slice(&read.key).map_err(|error| {
            content(self.options.key, &self.key, format!("no private key in PEM: {error}"))
        })?;
        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| self.pair(error))?;
        let builder = match (&self.client_ca, &read.client_ca) {
            (Some(path), Some(bytes)) => {
                let mut roots = RootCertStore::empty();
                for certificate in certificates("--client-ca", path, bytes)? {
                    roots
                        .add(certificate)
                        .map_err(|error| content("--client-ca", path, error.to_string()))?;
                }
                // Probes have no certificate: a client without one may call the probes, but no verb.
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                    .allow_unauthenticated()
                    .build()
                    .map_err(|error| content("--client-ca", path, error.to_string()))?;
                builder.with_client_cert_verifier(verifier)
            }
            _ => builder.with_no_client_auth(),
        };
        let mut config = builder.with_single_cert(chain, key).map_err(|error| self.pair(error))?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(config)
    }

    fn pair(&self, error: rustls::Error) -> TlsError {
        TlsError::Pair { options: self.options, cert: self.cert.clone(), key: self.key.clone(), error }
    }
}

fn certificates(
    option: &'static str,
    path: &Path,
    bytes: &[u8],
) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(bytes).collect();
    match found {
        Ok(found) if found.is_empty() => Err(content(option, path, "no certificate in PEM".to_owned())),
        Ok(found) => Ok(found),
        Err(error) => Err(content(option, path, format!("no certificate in PEM: {error}"))),
    }
}

/// The common name of a certificate's subject.
fn common_name(certificate: &[u8]) -> Option<String> {
    let (_, certificate) = x509_parser::parse_x509_certificate(certificate).ok()?;
    let mut names = certificate.subject().iter_common_name();
    names.next()?.as_str().ok().map(str::to_owned)
}

fn content(option: &'static str, path: &Path, words: String) -> TlsError {
    TlsError::Content { option, path: path.to_owned(), words }
}

fn read(option: &'static str, path: &Path) -> Result<Vec<u8>, TlsError> {
    let bytes = || {
        use std::io::Read as _;
        let mut bytes = Vec::new();
        std::fs::File::open(path)?.take(LARGEST + 1).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = bytes().map_err(|error| TlsError::Read { option, path: path.to_owned(), error })?;
    if bytes.len() as u64 > LARGEST {
        return Err(content(option, path, format!("larger than {LARGEST} bytes: no file of certificates")));
    }
    Ok(bytes)
}

#[cfg(test)]
pub(crate) mod tests {
    use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
    use tempfile::TempDir;

    use super::*;

    /// The name in every certificate.
    pub(crate) const CLIENT: &str = "system:kube-scheduler";

    /// An authority with a folder of files.
    pub(crate) struct Authority {
        pub(crate) folder: TempDir,
        issuer: Issuer<'static, KeyPair>,
    }

    impl Authority {
        pub(crate) fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let mut params = CertificateParams::new(Vec::new()).unwrap();
            params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
            let key = KeyPair::generate().unwrap();
            let own = params.self_signed(&key).unwrap();
            std::fs::write(folder.path().join("ca.crt"), own.pem()).unwrap();
            Self { folder, issuer: Issuer::new(params, key) }
        }

        /// Writes `name.crt` and `name.key`.
        pub(crate) fn issue(&self, name: &str) {
            self.issue_to(name, CLIENT);
        }

        /// The same, with another common name.
        pub(crate) fn issue_to(&self, name: &str, common_name: &str) {
            let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
            params.distinguished_name = rcgen::DistinguishedName::new();
            params.distinguished_name.push(rcgen::DnType::CommonName, common_name);
            params.extended_key_usages =
                vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
            let key = KeyPair::generate().unwrap();
            let certificate = params.signed_by(&key, &self.issuer).unwrap();
            std::fs::write(self.path(&format!("{name}.crt")), certificate.pem()).unwrap();
            std::fs::write(self.path(&format!("{name}.key")), key.serialize_pem()).unwrap();
        }

        pub(crate) fn path(&self, file: &str) -> PathBuf {
            self.folder.path().join(file)
        }

        pub(crate) fn files(&self, name: &str) -> Files {
            Files {
                options: FileOptions::VERBS,
                cert: self.path(&format!("{name}.crt")),
                key: self.path(&format!("{name}.key")),
                client_ca: Some(self.path("ca.crt")),
                client_name: CLIENT.to_owned(),
            }
        }
    }

    fn refused(files: Files) -> String {
        let folder = files.cert.parent().unwrap().display().to_string();
        Tls::load(files).unwrap_err().to_string().replace(&folder, "F")
    }

    #[test]
    fn expiry_is_that_of_the_first_certificate_of_each_file() {
        let authority = Authority::new();
        authority.issue("server");
        // Another authority, which expires before the first.
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.not_after = rcgen::date_time_ymd(2031, 1, 1);
        let own = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        let both = std::fs::read_to_string(authority.path("ca.crt")).unwrap() + &own.pem();
        std::fs::write(authority.path("ca.crt"), both).unwrap();
        let tls = Tls::load(authority.files("server")).unwrap();
        let server = CertificateParams::new(Vec::new()).unwrap().not_after.unix_timestamp();
        let expected =
            [Expiry { option: "tls-cert", at: server }, Expiry { option: "client-ca", at: 1_924_992_000 }];
        assert_eq!(*tls.expiries(), expected);
        let webhook = Files { options: FileOptions::WEBHOOK, client_ca: None, ..authority.files("server") };
        let expected = [Expiry { option: "webhook-cert", at: server }];
        assert_eq!(*Tls::load(webhook).unwrap().expiries(), expected);
    }

    #[test]
    fn load_names_the_bad_file_and_its_fault() {
        let authority = Authority::new();
        authority.issue("a");
        authority.issue("b");
        Tls::load(authority.files("a")).unwrap();
        let wrong = |change: fn(&mut Files, &Authority)| {
            let mut files = authority.files("a");
            change(&mut files, &authority);
            refused(files)
        };
        assert_eq!(
            wrong(|files, all| files.cert = all.path("none")),
            "--tls-cert F/none: No such file or directory (os error 2)"
        );
        assert_eq!(
            wrong(|files, all| files.cert = all.path("a.key")),
            "--tls-cert F/a.key: no certificate in PEM"
        );
        insta::assert_snapshot!(wrong(|files, all| files.key = all.path("a.crt")), @"--tls-key F/a.crt: no private key in PEM: no items found");
        insta::assert_snapshot!(wrong(|files, all| files.key = all.path("b.key")), @"--tls-cert F/a.crt and --tls-key F/b.key do not belong together: keys may not be consistent: KeyMismatch");
        assert_eq!(
            wrong(|files, all| files.client_ca = Some(all.path("a.key"))),
            "--client-ca F/a.key: no certificate in PEM"
        );
        let webhook = |files: &mut Files, all: &Authority| {
            files.options = FileOptions::WEBHOOK;
            files.key = all.path("b.key");
        };
        insta::assert_snapshot!(wrong(webhook), @"--webhook-cert F/a.crt and --webhook-key F/b.key do not belong together: keys may not be consistent: KeyMismatch");
    }

    #[tokio::test(start_paused = true)]
    async fn files_changed_before_follow_are_applied() {
        let authority = Authority::new();
        authority.issue("a");
        let tls = Arc::new(Tls::load(authority.files("a")).unwrap());
        let first = tls.config();
        authority.issue("a");
        let shutdown = CancellationToken::new();
        let (following, stop) = (Arc::clone(&tls), shutdown.clone());
        let task = tokio::spawn(async move { following.follow(stop).await });
        tokio::time::sleep(LOOK * 3).await;
        assert!(!Arc::ptr_eq(&first, &tls.config()));
        shutdown.cancel();
        task.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn new_files_are_applied_and_bad_ones_ignored() {
        let authority = Authority::new();
        authority.issue("a");
        let tls = Arc::new(Tls::load(authority.files("a")).unwrap());
        let shutdown = CancellationToken::new();
        let (following, stop) = (Arc::clone(&tls), shutdown.clone());
        let task = tokio::spawn(async move { following.follow(stop).await });
        let first = tls.config();
        let later = || tokio::time::sleep(LOOK * 3);
        later().await;
        assert!(Arc::ptr_eq(&first, &tls.config()), "nothing has changed");
        std::fs::write(authority.path("a.crt"), "half a fi").unwrap();
        later().await;
        assert!(Arc::ptr_eq(&first, &tls.config()));
        authority.issue("a");
        later().await;
        assert!(!Arc::ptr_eq(&first, &tls.config()));
        shutdown.cancel();
        task.await.unwrap();
    }
}
