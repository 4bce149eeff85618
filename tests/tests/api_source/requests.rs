//! Reports of requests to the API server.

use std::sync::{Arc, Mutex};

use anyhow::Result;
use http::{Request, StatusCode};
use proxy_userspace::{
    net::ProxyVariables,
    watch::{ApiRequest, OnApiRequest, kube_client},
};

use super::scene::{objects, server_with};

#[tokio::test]
async fn a_request_is_reported_with_its_server_and_status_also_if_it_fails() -> Result<()> {
    let server = server_with(&objects()).await?;
    let host = server.address().to_string();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let report = Arc::clone(&seen);
    let on_request: OnApiRequest = Arc::new(move |request: &ApiRequest<'_>| {
        let line = (request.method.to_string(), request.host.to_owned(), request.status);
        report.lock().expect("no panic").push(line);
    });
    let client = kube_client(None, &[server.url()], &ProxyVariables::default(), &on_request).await?;
    for path in ["/api/v1/services", "/nothing"] {
        let _response = client.request_text(Request::get(path).body(Vec::new())?).await;
    }
    drop(server);
    assert!(client.request_text(Request::get("/api/v1/services").body(Vec::new())?).await.is_err());
    let line = |status| ("GET".to_owned(), host.clone(), status);
    let expected = [Some(StatusCode::OK), Some(StatusCode::NOT_FOUND), None].map(line);
    assert_eq!(*seen.lock().expect("no panic"), expected);
    Ok(())
}
