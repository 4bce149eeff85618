//! What an error says about a name that stands for nothing.

use super::*;

#[test]
fn names_that_stand_for_nothing_have_a_hint() {
    let model = model(|_| ());
    for (to, part) in [
        ("fd96::80:80", "no Service has the address fd96::80:80: name a port, or is this [fd96::80]:80?"),
        ("fd96::80", "no Service has the address fd96::80: name a port"),
        (
            "shop/web:30080",
            "it has 80/tcp; 30080 is the node port: name an address of a node, such as 192.0.2.11:30080",
        ),
        ("shop/web:8080", "it has 80/tcp; 8080 is the port of the endpoints (targetPort)"),
        ("shop/web:81", "it has 80/tcp"),
        ("shop/wbe:80", "there is none, or it is headless or of another proxy"),
        (
            "example.com:443",
            "no Service com/example with a cluster IP, and none in the namespace com; DNS names",
        ),
    ] {
        let error = named(&model, "node", to, None).expect_err(to);
        assert!(error.contains(part), "{to}: {error}");
    }
}

#[test]
fn a_service_that_is_not_served_is_named_with_the_reason() {
    let mut model = model(|_| ());
    let db = || service("shop/db", "10.96.0.3");
    for (service, part) in [
        (Service { cluster_ips: Vec::new(), ..db() }, "the Service shop/db is headless"),
        (Service { service_type: ServiceType::ExternalName, ..db() }, "is of type ExternalName"),
        (Service { excluded_by_label: true, ..db() }, "the Service shop/db is left to another proxy"),
    ] {
        model.apply(WatchEvent::Services(Delta::Apply(service)));
        model.resolve();
        let error = named(&model, "node", "db.shop:80", None).expect_err(part);
        assert!(error.contains(part), "{error}");
    }
}
