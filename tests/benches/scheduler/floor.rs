//! The extender that answers at once: every node passes, the first is best, bind writes a plain Binding. It decides
//! nothing, so what it costs is the protocol's own cost.

use std::convert::Infallible;
use std::path::PathBuf;

use anyhow::{Context, Result};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::{Binding, ObjectReference};
use kube::api::PostParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use serde::Deserialize;
use serde_json::json;
use tokio::net::TcpListener;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Credentials for the Bindings.
    #[arg(long)]
    kubeconfig: PathBuf,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Question {
    node_names: Vec<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Bind {
    pod_name: String,
    pod_namespace: String,
    node: String,
}

/// Serves until killed.
pub(crate) async fn serve(args: &Args) -> Result<()> {
    let kubeconfig = Kubeconfig::read_from(&args.kubeconfig)?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    let client = Client::try_from(config)?;
    let listener = TcpListener::bind("127.0.0.1:8010").await?;
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let client = client.clone();
        tokio::spawn(async move {
            let service = service_fn(move |request| {
                let client = client.clone();
                async move { Ok::<_, Infallible>(answer(client, request).await) }
            });
            // A closed connection is the scheduler's business.
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

async fn answer(client: Client, request: Request<Incoming>) -> Response<Full<Bytes>> {
    let (status, body) = match reply(client, request).await {
        Ok(body) => (200, body),
        Err(error) => (500, format!("{error:#}").into_bytes()),
    };
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = hyper::StatusCode::from_u16(status).unwrap_or_default();
    response
}

async fn reply(client: Client, request: Request<Incoming>) -> Result<Vec<u8>> {
    let path = request.uri().path().to_owned();
    let body = request.into_body().collect().await?.to_bytes();
    let answer = match path.as_str() {
        "/filter" => {
            let question: Question = serde_json::from_slice(&body)?;
            json!({ "NodeNames": question.node_names })
        }
        "/prioritize" => {
            let question: Question = serde_json::from_slice(&body)?;
            let scores = question.node_names.iter().enumerate();
            scores
                .map(|(place, host)| json!({ "Host": host, "Score": if place == 0 { 10 } else { 0 } }))
                .collect()
        }
        "/bind" => {
            let bind: Bind = serde_json::from_slice(&body)?;
            write_binding(client, bind).await?;
            json!({ "Error": "" })
        }
        "/readyz" => json!("ok"),
        other => anyhow::bail!("no such path: {other}"),
    };
    Ok(serde_json::to_vec(&answer)?)
}

async fn write_binding(client: Client, bind: Bind) -> Result<()> {
    let mut binding = Binding {
        target: ObjectReference {
            kind: Some("Node".into()),
            name: Some(bind.node),
            ..ObjectReference::default()
        },
        ..Binding::default()
    };
    binding.metadata.name = Some(bind.pod_name.clone());
    let pods: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(client, &bind.pod_namespace);
    let _: k8s_openapi::apimachinery::pkg::apis::meta::v1::Status = pods
        .create_subresource("binding", &bind.pod_name, &PostParams::default(), &binding)
        .await
        .context("binding")?;
    Ok(())
}
